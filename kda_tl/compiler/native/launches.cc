// Several launches as one call: a sequence of kernels whose arguments are known but for the tensors of a call. What lies between
// the kernels is cut out of one piece of memory here, without a tensor object of torch's for each part of it.
//
// kda_tl.launches(views, kernels) returns a function of (scratch, tensors...): scratch is one-dimensional and holds the views;
// a view is [byte offset, DLPack type code, bits, sizes...], contiguous. A kernel is [function, constants, arguments]; its
// arguments count the constants from 0, the views from -1 downwards, and the tensors of the call from kFirstTensor.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace {

using tvm::ffi::Any;
using tvm::ffi::AnyView;
using tvm::ffi::Array;
using tvm::ffi::Function;
using tvm::ffi::PackedArgs;

constexpr int64_t kFirstTensor = 1 << 16;

struct View {
  int64_t offset;
  DLDataType dtype;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
};

struct Kernel {
  Function function;
  std::vector<Any> constants;
  std::vector<int64_t> arguments;
};

View MakeView(const Array<int64_t>& row) {
  TVM_FFI_ICHECK_GE(row.size(), 3u) << "a view is an offset, a type code, bits and sizes";
  View view{row[0], {static_cast<uint8_t>(row[1]), static_cast<uint8_t>(row[2]), 1}, {}, {}};
  view.sizes.assign(row.begin() + 3, row.end());
  view.strides.assign(view.sizes.size(), 1);
  for (size_t i = view.sizes.size(); i > 1; --i) view.strides[i - 2] = view.strides[i - 1] * view.sizes[i - 1];
  return view;
}

Function Launches(const Array<Array<int64_t>>& view_rows, const Array<Array<Any>>& kernel_rows) {
  std::vector<View> views;
  std::vector<Kernel> kernels;
  size_t most = 0;
  for (const auto& row : view_rows) views.push_back(MakeView(row));
  for (const auto& row : kernel_rows) {
    const auto constants = row[1].cast<Array<Any>>();
    const auto arguments = row[2].cast<Array<int64_t>>();
    kernels.push_back({row[0].cast<Function>(), {constants.begin(), constants.end()}, {arguments.begin(), arguments.end()}});
    if (arguments.size() > most) most = arguments.size();
  }
  return Function::FromPacked([views = std::move(views), kernels = std::move(kernels), most](PackedArgs args, Any*) {
    const auto* scratch = args[0].cast<DLTensor*>();
    std::vector<DLTensor> tensors(views.size());
    for (size_t i = 0; i < views.size(); ++i) {
      const View& view = views[i];
      tensors[i] = {static_cast<char*>(scratch->data) + scratch->byte_offset + view.offset,
                    scratch->device,
                    static_cast<int32_t>(view.sizes.size()),
                    view.dtype,
                    const_cast<int64_t*>(view.sizes.data()),
                    const_cast<int64_t*>(view.strides.data()),
                    0};
    }
    std::vector<AnyView> given(most);
    for (const Kernel& kernel : kernels) {
      for (size_t i = 0; i < kernel.arguments.size(); ++i) {
        const int64_t which = kernel.arguments[i];
        if (which >= kFirstTensor) {
          given[i] = args[static_cast<int>(which - kFirstTensor + 1)];
        } else if (which >= 0) {
          given[i] = kernel.constants[which];
        } else {
          given[i] = &tensors[-which - 1];
        }
      }
      Any result;
      kernel.function.CallPacked(given.data(), static_cast<int32_t>(kernel.arguments.size()), &result);
    }
  });
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() { tvm::ffi::reflection::GlobalDef().def("kda_tl.launches", Launches); }
