// The one function of libtilelang.so that launchers of TMA kernels call, for machines without TileLang: encodes a tiled
// tensor map with the driver's cuTensorMapEncodeTiled. Arguments, in order: the map (out), data type, rank, base address,
// then rank values each of global sizes, global strides, box sizes and element strides, then interleave, swizzle,
// L2 promotion and out-of-bounds fill.
#include <dlfcn.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <array>
#include <cstdint>

namespace {

constexpr int kMaxRank = 5;
using Encode = int (*)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*, int, int,
                       int, int);

Encode FindEncode() {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  return driver == nullptr ? nullptr : reinterpret_cast<Encode>(dlsym(driver, "cuTensorMapEncodeTiled"));
}

template <typename T>
std::array<T, kMaxRank> Values(const tvm::ffi::PackedArgs& args, int first, int count) {
  std::array<T, kMaxRank> values{};
  for (int i = 0; i < count; ++i) values[i] = static_cast<T>(args[first + i].cast<int64_t>());
  return values;
}

void TensorMapCreateTiled(tvm::ffi::PackedArgs args, tvm::ffi::Any* result) {
  static const Encode encode = FindEncode();
  TVM_FFI_ICHECK(encode != nullptr) << "libcuda.so.1 has no cuTensorMapEncodeTiled: the NVIDIA driver is missing or older than 12.0";
  const int rank = static_cast<int>(args[2].cast<int64_t>());
  TVM_FFI_ICHECK(rank >= 1 && rank <= kMaxRank) << "a tensor map has 1 to " << kMaxRank << " dimensions, got " << rank;
  const auto sizes = Values<uint64_t>(args, 4, rank);
  const auto strides = Values<uint64_t>(args, 4 + rank, rank);
  const auto box = Values<uint32_t>(args, 4 + 2 * rank, rank);
  const auto steps = Values<uint32_t>(args, 4 + 3 * rank, rank);
  const int tail = 4 + 4 * rank;
  // The driver takes the strides of all dimensions but the innermost.
  const int status = encode(args[0].cast<void*>(), static_cast<int>(args[1].cast<int64_t>()), static_cast<uint32_t>(rank),
                            args[3].cast<void*>(), sizes.data(), strides.data() + 1, box.data(), steps.data(),
                            static_cast<int>(args[tail].cast<int64_t>()), static_cast<int>(args[tail + 1].cast<int64_t>()),
                            static_cast<int>(args[tail + 2].cast<int64_t>()), static_cast<int>(args[tail + 3].cast<int64_t>()));
  TVM_FFI_ICHECK_EQ(status, 0) << "cuTensorMapEncodeTiled failed: are base address and strides multiples of 16 bytes?";
  *result = status;
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef().def_packed("kda_tl.tensormap_create_tiled", TensorMapCreateTiled);
}
