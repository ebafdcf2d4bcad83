// A call that comes again: recognised by the values of its arguments, and made as one sequence of launches, without a tensor
// object of torch's for what lies between the kernels or for another view of what the caller handed over.
//
// kda_tl.calls(most, valued) returns [find, settle]. find(arguments...) tells what is known of such a call: 0, nothing; minus its
// number, where it has come before, unsettled, and no two of its tensors start in one place; else a ticket for the function that
// was made for it, whose lowest 31 bits are its number. The ticket is good for the thread's last find alone.
// settle(number, kept) says what find returns from now on: tickets, or 0. Arguments are tensors and plain values; of tensors in
// host memory at the places `valued`, the elements count as well. `most` calls are known, the oldest are forgotten.
//
// kda_tl.fused(layout, objects, scratch_bytes, number, given) returns the function. With number 0 it takes all the tensors that
// views lie in; else (ticket, tensors...) with the first `given` of them, the others being the arguments of the find; it then
// returns whether the ticket was good, and launches nothing where it was not. The layout is a row of int64: how many views there
// are, the views, how many kernels, the kernels. A view is its base, byte offset, DLPack type code, bits, rank, sizes and
// strides; bases count the tensors from 0, -1 is the scratch memory, which is torch's. A kernel is its function's place among the
// objects, the number of its arguments, and these: of objects from 0 on, of views from -1 downwards.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using tvm::ffi::Any;
using tvm::ffi::AnyView;
using tvm::ffi::Array;
using tvm::ffi::Bytes;
using tvm::ffi::Function;
using tvm::ffi::PackedArgs;
using tvm::ffi::Tensor;
using tvm::ffi::TypedFunction;

constexpr int kNumberBits = 31;
constexpr int64_t kNumberMask = (int64_t{1} << kNumberBits) - 1;

// What the thread's last find was given. Its tensors live as long as the caller holds them, which a ticket cannot outlast:
// the next find has another serial number.
struct Found {
  int64_t ticket = 0;
  int64_t serial = 0;
  std::vector<char*> data;
};
thread_local Found found;

char* Start(const DLTensor* tensor) { return static_cast<char*>(tensor->data) + tensor->byte_offset; }

// -- recognition -----------------------------------------------------------------------------------------------------

using Key = std::vector<int64_t>;

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t hash = key.size();
    for (const int64_t word : key) {
      hash = (hash ^ static_cast<uint64_t>(word)) * 0x9E3779B97F4A7C15ull;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

enum class State { kUnsettled, kKept, kRefused };

struct Known {
  int64_t number;
  State state;
};

// The elements of a list of integers, where the host has them; false where it is no list, or nobody knows who has them.
bool AppendElements(const DLTensor& tensor, Key* key) {
  const auto where = tensor.device.device_type;
  if (where == kDLCUDA || where == kDLROCM) return true;
  if (where != kDLCPU && where != kDLCUDAHost && where != kDLROCMHost) return false;
  if (tensor.ndim != 1 || tensor.dtype.code != kDLInt || tensor.dtype.lanes != 1) return false;
  const int64_t step = tensor.strides == nullptr ? 1 : tensor.strides[0];
  for (int64_t i = 0; i < tensor.shape[0]; ++i) {
    if (tensor.dtype.bits == 32) {
      key->push_back(reinterpret_cast<const int32_t*>(Start(&tensor))[i * step]);
    } else if (tensor.dtype.bits == 64) {
      key->push_back(reinterpret_cast<const int64_t*>(Start(&tensor))[i * step]);
    } else {
      return false;
    }
  }
  return true;
}

// Whether each tensor can be told from the others by where it starts.
bool AllDistinct(const std::vector<char*>& starts) {
  for (size_t i = 0; i < starts.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (starts[i] == starts[j] && starts[i] != nullptr) return false;
    }
  }
  return true;
}

// All of an argument that a decision may depend on. Of an address that is its place within 16 bytes.
bool Append(const AnyView& argument, bool valued, Key* key, char** data) {
  *data = nullptr;
  switch (argument.type_index()) {
    case TVMFFITypeIndex::kTVMFFINone:
      key->push_back(-1);
      return true;
    case TVMFFITypeIndex::kTVMFFIBool:
      key->push_back(-2);
      key->push_back(argument.cast<bool>());
      return true;
    case TVMFFITypeIndex::kTVMFFIInt:
      key->push_back(-3);
      key->push_back(argument.cast<int64_t>());
      return true;
    case TVMFFITypeIndex::kTVMFFIFloat: {
      const double value = argument.cast<double>();
      int64_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      key->push_back(-4);
      key->push_back(bits);
      return true;
    }
    case TVMFFITypeIndex::kTVMFFIDLTensorPtr:
    case TVMFFITypeIndex::kTVMFFITensor:
      break;
    default:
      return false;
  }
  const auto* tensor = argument.cast<DLTensor*>();
  char* const start = Start(tensor);
  const int64_t dtype = int64_t{tensor->dtype.code} << 24 | int64_t{tensor->dtype.bits} << 16 | tensor->dtype.lanes;
  key->push_back(int64_t{tensor->ndim} << 40 | dtype << 4 | static_cast<int64_t>(reinterpret_cast<uintptr_t>(start) & 15));
  key->push_back(int64_t{tensor->device.device_type} << 32 | static_cast<uint32_t>(tensor->device.device_id));
  int64_t next = 1;
  for (int i = tensor->ndim - 1; i >= 0; --i) {
    key->push_back(tensor->shape[i]);
    key->push_back(tensor->strides == nullptr ? next : tensor->strides[i]);
    next *= tensor->shape[i];
  }
  if (next > 0) *data = start;
  return !valued || AppendElements(*tensor, key);
}

class Calls {
  using Entry = std::pair<const Key, Known>;

 public:
  Calls(int64_t most, const Array<int64_t>& valued) : most_(static_cast<size_t>(most)) {
    for (const int64_t place : valued) {
      if (static_cast<size_t>(place) >= valued_.size()) valued_.resize(place + 1, false);
      valued_[place] = true;
    }
  }

  int64_t Find(const PackedArgs& args) {
    thread_local Key key;
    key.clear();
    found.ticket = 0;
    found.data.resize(args.size());
    for (int i = 0; i < args.size(); ++i) {
      const bool valued = static_cast<size_t>(i) < valued_.size() && valued_[i];
      if (!Append(args[i], valued, &key, &found.data[i])) return 0;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = known_.find(key);
    if (known == known_.end()) {
      Insert(key);
      return 0;
    }
    Known& call = known->second;
    if (call.state == State::kRefused) return 0;
    if (call.state != State::kKept) {
      return AllDistinct(found.data) ? -call.number : 0;
    }
    found.serial = (found.serial + 1) & kNumberMask;
    return found.ticket = found.serial << kNumberBits | call.number;
  }

  void Settle(int64_t number, bool kept) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto call = by_number_.find(number);
    if (call != by_number_.end()) call->second->second.state = kept ? State::kKept : State::kRefused;
  }

 private:
  void Insert(const Key& key) {
    while (known_.size() >= most_) {
      const Entry* const oldest = oldest_.front();
      oldest_.pop_front();
      by_number_.erase(oldest->second.number);
      known_.erase(known_.find(oldest->first));
    }
    last_ = last_ % kNumberMask + 1;
    Entry* const entry = &*known_.emplace(key, Known{last_, State::kUnsettled}).first;
    by_number_[last_] = entry;
    oldest_.push_back(entry);
  }

  const size_t most_;
  std::vector<bool> valued_;
  std::mutex mutex_;
  std::unordered_map<Key, Known, KeyHash> known_;
  std::unordered_map<int64_t, Entry*> by_number_;
  std::deque<Entry*> oldest_;
  int64_t last_ = 0;
};

Array<Function> MakeCalls(int64_t most, const Array<int64_t>& valued) {
  const auto calls = std::make_shared<Calls>(most, valued);
  return {Function::FromPacked([calls](PackedArgs args, Any* result) { *result = calls->Find(args); }),
          Function::FromTyped([calls](int64_t number, bool kept) { calls->Settle(number, kept); })};
}

// -- launches --------------------------------------------------------------------------------------------------------

struct View {
  int64_t base;
  int64_t offset;
  DLDataType dtype;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
};

struct Kernel {
  Function function;
  std::vector<int64_t> arguments;
};

// Reads a layout from its start.
class Row {
 public:
  explicit Row(const Bytes& bytes) : values_(bytes.size() / sizeof(int64_t)) {
    std::memcpy(values_.data(), bytes.data(), values_.size() * sizeof(int64_t));
  }
  int64_t Next() { return values_.at(next_++); }
  std::vector<int64_t> Next(int64_t count) {
    std::vector<int64_t> found;
    for (int64_t i = 0; i < count; ++i) found.push_back(Next());
    return found;
  }

 private:
  std::vector<int64_t> values_;
  size_t next_ = 0;
};

class Launches {
 public:
  Launches(Row row, const Array<Any>& objects, int64_t scratch_bytes)
      : scratch_bytes_(scratch_bytes), objects_(objects.begin(), objects.end()) {
    for (int64_t left = row.Next(); left > 0; --left) {
      View view{row.Next(), row.Next(), {}, {}, {}};
      view.dtype.code = static_cast<uint8_t>(row.Next());
      view.dtype.bits = static_cast<uint8_t>(row.Next());
      view.dtype.lanes = 1;
      const int64_t rank = row.Next();
      view.sizes = row.Next(rank);
      view.strides = row.Next(rank);
      views_.push_back(std::move(view));
    }
    for (int64_t left = row.Next(); left > 0; --left) {
      auto function = objects_.at(row.Next()).cast<Function>();
      auto arguments = row.Next(row.Next());
      if (arguments.size() > most_) most_ = arguments.size();
      kernels_.push_back({std::move(function), std::move(arguments)});
    }
  }

  // base(i): where the tensor that is counted as i starts.
  template <typename Base>
  void Run(DLDevice device, const Base& base) const {
    Tensor scratch;
    if (scratch_bytes_ > 0) {
      // By torch's own allocator, on the stream that the kernels run on; given back when they have been launched.
      scratch = Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, {scratch_bytes_}, {kDLUInt, 8, 1}, device);
    }
    std::vector<DLTensor> tensors(views_.size());
    for (size_t i = 0; i < views_.size(); ++i) {
      const View& view = views_[i];
      char* start = view.base < 0 ? static_cast<char*>(scratch.data_ptr()) : base(view.base);
      tensors[i] = {start == nullptr ? nullptr : start + view.offset,
                    device,
                    static_cast<int32_t>(view.sizes.size()),
                    view.dtype,
                    const_cast<int64_t*>(view.sizes.data()),
                    const_cast<int64_t*>(view.strides.data()),
                    0};
    }
    std::vector<AnyView> given(most_);
    for (const Kernel& kernel : kernels_) {
      for (size_t i = 0; i < kernel.arguments.size(); ++i) {
        const int64_t which = kernel.arguments[i];
        if (which >= 0) {
          given[i] = objects_[which];
        } else {
          given[i] = &tensors[-which - 1];
        }
      }
      Any result;
      kernel.function.CallPacked(given.data(), static_cast<int32_t>(kernel.arguments.size()), &result);
    }
  }

 private:
  const int64_t scratch_bytes_;
  const std::vector<Any> objects_;
  std::vector<View> views_;
  std::vector<Kernel> kernels_;
  size_t most_ = 0;
};

Function MakeFused(const Bytes& layout, const Array<Any>& objects, int64_t scratch_bytes, int64_t number, int64_t given) {
  const auto launches = std::make_shared<Launches>(Row(layout), objects, scratch_bytes);
  const auto tensor_of = [](const AnyView& argument) -> const DLTensor* {
    return argument.type_index() == TVMFFITypeIndex::kTVMFFINone ? nullptr : argument.cast<DLTensor*>();
  };
  if (number == 0) {
    return Function::FromPacked([launches, tensor_of](PackedArgs args, Any*) {
      launches->Run(args[0].cast<DLTensor*>()->device, [&](int64_t i) -> char* {
        const DLTensor* tensor = tensor_of(args[static_cast<int>(i)]);
        return tensor == nullptr ? nullptr : Start(tensor);
      });
    });
  }
  return Function::FromPacked([launches, tensor_of, number, given](PackedArgs args, Any* result) {
    const int64_t ticket = args[0].cast<int64_t>();
    if (ticket == 0 || ticket != found.ticket || (ticket & kNumberMask) != number) {
      *result = false;
      return;
    }
    found.ticket = 0;
    // A copy: a kernel's launcher could come back to Python, and that to a find.
    const std::vector<char*> data = found.data;
    launches->Run(args[1].cast<DLTensor*>()->device, [&](int64_t i) -> char* {
      if (i >= given) return data[i - given];
      const DLTensor* tensor = tensor_of(args[static_cast<int>(i) + 1]);
      return tensor == nullptr ? nullptr : Start(tensor);
    });
    *result = true;
  });
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  tvm::ffi::reflection::GlobalDef().def("kda_tl.calls", MakeCalls).def("kda_tl.fused", MakeFused);
}
