// What torch's operations do on the devices. They are launched on the current stream, and run on the CPU, when their
// turn has come, on the devices' memory as it can be reached there; the host goes on, unless it needs a result.
#include "memory.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <array>
#include <cstring>

namespace late {

using at::Tensor;
using c10::IValue;
using Stack = std::vector<IValue>;
using Map = std::function<Tensor(const Tensor&)>;

at::Generator& generator(int device) {
  static auto& generators =
      *new std::array<at::Generator, DEVICES>{at::detail::createCPUGenerator(0), at::detail::createCPUGenerator(1)};
  return generators.at(device);
}

namespace {

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

bool is_late(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == c10::kPrivateUse1; }

Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(c10::kPrivateUse1)));
  return at::detail::empty_strided_generic(sizes, strides, c10::GetAllocator(c10::kPrivateUse1), KEYS,
                                           c10::dtype_or_default(dtype));
}

Tensor empty(c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(c10::kPrivateUse1)));
  return at::detail::empty_generic(sizes, c10::GetAllocator(c10::kPrivateUse1), KEYS, c10::dtype_or_default(dtype),
                                   format);
}

Tensor empty_like_on(const Tensor& like, c10::Device device) {
  return empty_strided(like.sizes(), like.strides(), like.scalar_type(), {}, device, {});
}

// A tensor on the CPU that has the memory of one on a device, to which it does not hold on.
Tensor twin(const Tensor& tensor) {
  const auto options = at::TensorOptions(tensor.scalar_type()).device(c10::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  Tensor made = at::from_blob(reach(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
  made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  return made;
}

void launch_copy(Queue& queue, const Tensor& to, const Tensor& from) {
  launch(queue, Kind::WORK, [to, from] { to.copy_(from); });
}

// Whether all bytes of one follow each other as in the other.
bool is_plain_copy(const Tensor& to, const Tensor& from) {
  return to.scalar_type() == from.scalar_type() && to.is_contiguous() && from.is_contiguous() &&
         to.is_conj() == from.is_conj() && to.is_neg() == from.is_neg();
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking);

// To memory that is not pinned, the host waits in any case; so it does where the values are put in order on the host.
void copy_to_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (!is_plain_copy(to, from)) {
    Tensor in_order = empty(to.sizes(), to.scalar_type(), {}, from.device(), {}, {});
    copy_from(from, in_order, true);
    if (to.is_contiguous() && !to.is_conj() && !to.is_neg()) return copy_to_host(in_order, to, non_blocking);
    Tensor host = at::empty(to.sizes(), to.scalar_type());
    copy_to_host(in_order, host, false);
    to.copy_(host);
    return;
  }
  Queue& queue = current_queue(from.device().index());
  void* target = to.mutable_data_ptr();
  const bool is_late_copy = is_pinned(target, to.nbytes()) && non_blocking;
  const Tensor kept = is_late_copy ? Tensor() : to;  // the wait may fail
  launch(queue, Kind::TO_HOST, [kept, target, source = reach(from.const_data_ptr()), size = to.nbytes()] {
    std::memcpy(target, source, size);
  });
  if (is_late_copy) keep_pinned_until(target, record(queue));
  else synchronize(queue);
}

// From memory that is not pinned, the bytes are put aside at once.
void copy_to_device(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (!is_plain_copy(to, from)) {
    const Tensor host = from.to(to.scalar_type()).resolve_conj().resolve_neg().contiguous();
    if (to.is_contiguous() && !to.is_conj() && !to.is_neg()) return copy_to_device(host, to, non_blocking);
    Tensor in_order = empty(to.sizes(), to.scalar_type(), {}, to.device(), {}, {});
    copy_to_device(host, in_order, non_blocking);
    copy_from(in_order, to, true);
    return;
  }
  Queue& queue = current_queue(to.device().index());
  const bool is_late_copy = is_pinned(from.const_data_ptr(), from.nbytes()) && non_blocking;
  const Tensor kept = is_late_copy ? Tensor() : from.clone();
  const void* source = is_late_copy ? from.const_data_ptr() : kept.const_data_ptr();
  launch(queue, Kind::TO_DEVICE, [kept, source, target = reach(to.const_data_ptr()), size = to.nbytes()] {
    std::memcpy(target, source, size);
  });
  if (is_late_copy) keep_pinned_until(source, record(queue));
  if (!non_blocking) synchronize(queue);
}

Tensor copy_from(const Tensor& source, const Tensor& to, bool non_blocking) {
  const Tensor from = source.expand_as(to);
  if (to.numel() == 0) return to;
  if (!is_late(to)) {
    copy_to_host(from, to, non_blocking);
  } else if (!is_late(from)) {
    copy_to_device(from, to, non_blocking);
  } else {  // on the stream of the source, as CUDA; that of the target waits
    Queue &queue = current_queue(from.device().index()), &other = current_queue(to.device().index());
    if (&queue != &other) let_wait(queue, record(other));
    launch_copy(queue, twin(to), twin(from));
    if (&queue != &other) let_wait(other, record(queue));
  }
  return to;
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef sizes, std::optional<c10::MemoryFormat>) {
  const size_t needed = self.itemsize() * (self.storage_offset() + c10::multiply_integers(sizes));
  c10::StorageImpl* storage = self.storage().unsafeGetStorageImpl();
  if (needed > storage->nbytes()) {
    const c10::DeviceGuard guard(self.device());
    c10::DataPtr larger = c10::GetAllocator(c10::kPrivateUse1)->allocate(needed);
    if (storage->nbytes()) c10::GetAllocator(c10::kPrivateUse1)->copy_data(larger.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(larger));
    storage->set_nbytes(needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

void record_stream(Tensor& self, c10::Stream stream) {
  if (self.storage().nbytes()) use_memory_on(self.storage().data(), queue_of(stream));
}

// An argument of an operation with each tensor in it replaced.
IValue with_tensors(const IValue& value, const Map& map) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> mapped;
    for (const Tensor& tensor : value.toTensorVector()) mapped.push_back(map(tensor));
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> mapped;
    for (const auto& tensor : value.toOptionalTensorVector())
      mapped.push_back(tensor ? std::optional(map(*tensor)) : std::nullopt);
    return mapped;
  }
  return value;
}

std::optional<c10::Device> device_of(const Stack& arguments) {
  std::optional<c10::Device> device;
  for (const IValue& argument : arguments)
    with_tensors(argument, [&](const Tensor& tensor) {
      if (!device && is_late(tensor)) device = tensor.device();
      return tensor;
    });
  return device;
}

// The results whose shapes torch knows beforehand, or nothing.
std::optional<Stack> shapes_of_results(const c10::OperatorHandle& op, const Stack& arguments) {
  Stack stack;
  for (const IValue& argument : arguments)
    stack.push_back(argument.isDevice() ? IValue(c10::Device(c10::kMeta)) : with_tensors(argument, [](const Tensor& tensor) {
      return tensor.defined() ? at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta).pinned_memory({}))
                              : tensor;
    }));
  try {
    op.callBoxed(&stack);
  } catch (const c10::Error&) {
    return {};  // what is wrong with the operation, if so, is raised where it runs
  }
  return stack;
}

class Operation {
 public:
  Operation(const c10::OperatorHandle& op, Stack arguments) : op_(op), arguments_(std::move(arguments)) {
    const auto device = device_of(arguments_);
    TORCH_CHECK_NOT_IMPLEMENTED(device, op.schema().name(), " is not there for late devices");
    device_ = *device;
    const auto& schema = op.schema();
    for (const auto& result : schema.returns()) {
      TORCH_CHECK_NOT_IMPLEMENTED(!result.alias_info() || result.alias_info()->isWrite(), schema.name(),
                                  " makes a view, which is not there for late devices");
      has_only_arguments_ = has_only_arguments_ && result.alias_info();
      has_only_tensors_ = has_only_tensors_ && (result.type()->isSubtypeOf(*c10::TensorType::get()) ||
                                                result.type()->isSubtypeOf(*c10::ListType::ofTensors()));
    }
    for (size_t at = 0; at < arguments_.size(); at++) {
      const auto& argument = schema.arguments()[at];
      has_unsized_outputs_ = has_unsized_outputs_ || (argument.is_out() && arguments_[at].toTensor().numel() == 0);
    }
  }

  Stack run() {
    Queue& queue = current_queue(device_.index());
    const bool is_known = has_only_tensors_ && !has_unsized_outputs_;
    std::optional<Stack> shapes;
    if (is_known && !has_only_arguments_) shapes = shapes_of_results(op_, arguments_);
    auto stack = std::make_shared<Stack>(on_host());
    auto work = [op = op_, stack] { op.callBoxed(stack.get()); };
    if (has_only_arguments_ && is_known) {
      launch(queue, Kind::WORK, [work, stack] { work(), stack->clear(); });
      return results({}, nullptr);
    }
    if (!shapes) {
      launch(queue, Kind::WORK, work);
      synchronize(queue);
      return results(*stack, [&](const Tensor& made) {
        Tensor result = empty_like_on(made, device_);
        if (made.numel()) launch_copy(queue, twin(result), made);
        return result;
      });
    }
    std::vector<Tensor> twins;
    Stack made = results(*shapes, [&](const Tensor& shape) {
      Tensor result = empty_like_on(shape, device_);
      twins.push_back(twin(result));
      return result;
    });
    // without the arguments, which Python may have let go by then: to destroy them needs its lock, which the host may
    // have while it waits for this
    Operation this_op = *this;
    this_op.arguments_.clear();
    launch(queue, Kind::WORK, [this_op, work, stack, twins] {
      work();
      size_t next = 0;
      this_op.results(*stack, [&](const Tensor& result) {
        if (result.numel()) twins.at(next).copy_(result);
        return twins.at(next++);
      });
      stack->clear();
    });
    return made;
  }

 private:
  Stack on_host() const {
    Stack stack;
    for (size_t at = 0; at < arguments_.size(); at++) {
      const auto& argument = op_.schema().arguments()[at];
      const bool is_written = argument.alias_info() && argument.alias_info()->isWrite();
      IValue value = with_tensors(arguments_[at], [&](const Tensor& tensor) -> Tensor {
        if (is_late(tensor)) {
          TORCH_CHECK(tensor.device() == device_, "Expected all tensors to be on the same device, but found at least two"
                      " devices, ", device_, " and ", tensor.device(), "!");
          return twin(tensor);
        }
        TORCH_CHECK(!is_written || !tensor.defined(), op_.schema().name(), " cannot write to the CPU from ", device_);
        return tensor.defined() ? tensor.clone() : tensor;
      });
      if (value.isDevice()) value = c10::Device(c10::kCPU);
      if (value.isNone() && argument.type()->str() == "Generator?") value = generator(device_.index());
      stack.push_back(std::move(value));
    }
    return stack;
  }

  // What the operation returns: arguments where it says so, else what is made of what it has returned elsewhere.
  Stack results(const Stack& elsewhere, const Map& make) const {
    Stack made;
    const auto& schema = op_.schema();
    for (size_t at = 0; at < schema.returns().size(); at++) {
      const auto* alias = schema.returns()[at].alias_info();
      if (!alias) {
        made.push_back(with_tensors(elsewhere[at], [&](const Tensor& tensor) { return tensor.defined() ? make(tensor) : tensor; }));
        continue;
      }
      for (size_t from = 0; from < arguments_.size(); from++)
        if (const auto* of = schema.arguments()[from].alias_info(); of && *of == *alias) {
          if (has_unsized_outputs_ && make) fill(arguments_[from].toTensor(), elsewhere[at].toTensor());
          made.push_back(arguments_[from]);
        }
    }
    return made;
  }

  void fill(const Tensor& output, const Tensor& result) const {
    resize_(output, result.sizes(), {});
    if (result.numel()) launch_copy(current_queue(device_.index()), twin(output), result);
  }

  c10::OperatorHandle op_;
  Stack arguments_;
  c10::Device device_ = c10::kCPU;
  bool has_only_arguments_ = true, has_only_tensors_ = true, has_unsized_outputs_ = false;
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto count = static_cast<int64_t>(op.schema().arguments().size());
  Operation operation(op, Stack(stack->end() - count, stack->end()));
  stack->erase(stack->end() - count, stack->end());
  for (IValue& result : operation.run()) stack->push_back(std::move(result));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// The copy sees to these views itself; torch would clone them, which is a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  // called by its name with `out=`, torch's own on the CPU takes that for what is not reduced yet
  library.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("resize_", resize_);
  library.impl("record_stream", record_stream);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(at::native::set_));
  library.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
}

}  // namespace
}  // namespace late
