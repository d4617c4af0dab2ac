// What `torch.late` is made of, and what torch asks an accelerator.
#include "memory.h"

#include <ATen/core/Generator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace late {

at::Generator& generator(int device);

namespace {

namespace py = pybind11;
using Unlocked = py::call_guard<py::gil_scoped_release>;

struct Hooks final : at::PrivateUse1HooksInterface {
  using Index = c10::DeviceIndex;

  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(Index device) const override {
    for (const auto& [thread, used] : first_uses())
      if (used == device) return true;
    return false;
  }
  Index deviceCount() const override { return DEVICES; }
  Index getCurrentDevice() const override { return static_cast<Index>(current_device()); }
  void setCurrentDevice(Index device) const override { exchange_device(device); }
  Index exchangeDevice(Index device) const override { return static_cast<Index>(exchange_device(device)); }
  Index maybeExchangeDevice(Index device) const override {
    const int before = current_device();
    go_back_to_device(device);
    return static_cast<Index>(before);
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  const at::Generator& getDefaultGenerator(Index device) const override {
    return generator(device < 0 ? current_device() : device);
  }
};

Queue& queue(int device, int64_t stream) {
  const c10::Device of(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device));
  return queue_of(c10::Stream(c10::Stream::UNSAFE, of, stream));
}

PYBIND11_MODULE(_late, module) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);

  module.attr("device_count") = DEVICES;
  module.def("current_device", current_device);
  module.def("set_device", [](int device) { exchange_device(device); });
  module.def("go_back_to_device", go_back_to_device);
  module.def("synchronize", synchronize_device, Unlocked());
  module.def("seed", [](int64_t seed) {
    for (int device = 0; device < DEVICES; device++) generator(device).set_current_seed(seed + device);
  });
  module.def("empty_cache", empty_cache, Unlocked());
  module.def("memory_allocated", allocated);
  module.def("max_memory_allocated", most_allocated);
  module.def("reset_peak_memory_stats", forget_most_allocated);
  module.def("set_memory_limit", set_memory_limit);

  py::enum_<Kind>(module, "Kind").value("TO_HOST", Kind::TO_HOST).value("TO_DEVICE", Kind::TO_DEVICE);
  module.def("hold_stream", [](int device, int64_t stream) { hold_queue(queue(device, stream)); });
  module.def("hold_copies", hold_kind);
  module.def("release", release);
  module.def("settle", settle, Unlocked());
  module.def("set_delay", set_delay);
  module.def("shut_down", shut_down, Unlocked());
  module.def("is_forked", is_forked);
  module.def("first_uses", first_uses);
  module.def("use_device", use_device);
  module.def("forget_uses", forget_uses);

  module.def("add_pinned", add_pinned);
  module.def("remove_pinned", remove_pinned);

  py::enum_<CaptureMode>(module, "CaptureMode")
      .value("GLOBAL", CaptureMode::GLOBAL)
      .value("THREAD_LOCAL", CaptureMode::THREAD_LOCAL)
      .value("RELAXED", CaptureMode::RELAXED);
  module.def("begin_capture", begin_capture);
  module.def("end_capture", end_capture);
  module.def("is_capturing", is_capturing);
  module.def("spoils_capture", spoils_capture);
  module.def("exchange_capture_mode", exchange_capture_mode);
}

}  // namespace
}  // namespace late
