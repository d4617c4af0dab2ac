#include "streams.h"

#include "memory.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <set>
#include <thread>

namespace late {

struct Recording {
  bool is_done = false;
};

struct Item {
  Kind kind;
  std::function<void()> work;
  Recorded awaits, completes;
};

struct Queue {
  int device = 0;
  int64_t id = 0;
  std::deque<Item> items;
  bool has_thread = false, is_running = false, is_held = false;
  std::condition_variable wake;
};

namespace {

// One lock for all; what a thread does without it is the work itself.
struct State {
  std::mutex lock;
  std::condition_variable changed;
  std::array<std::array<Queue, STREAMS>, DEVICES> queues;
  std::array<int64_t, DEVICES> next_stream{};
  std::set<Kind> held_kinds;
  std::thread::id holder;
  double delay_s = 0;
  std::string error;
  std::set<std::pair<int64_t, int>> uses;
  bool is_closed = false, is_capturing = false, is_spoiled = false;
  std::thread::id capturer;
  const pid_t process = getpid();
};

State& state() {
  static State& the_state = *[] {
    auto* made = new State;  // never destroyed: threads and tensors outlive static objects
    for (int device = 0; device < DEVICES; device++)
      for (int id = 0; id < STREAMS; id++) {
        made->queues[device][id].device = device;
        made->queues[device][id].id = id;
      }
    return made;
  }();
  return the_state;
}

thread_local int the_device = 0;
thread_local std::array<int64_t, DEVICES> the_stream{};
thread_local CaptureMode the_mode = CaptureMode::GLOBAL;

using Lock = std::unique_lock<std::mutex>;

// The state, for as long as nobody else has it.
struct Locked {
  Lock lock{state().lock};
  State* operator->() const { return &state(); }
};

bool is_ready(const State& s, const Queue& q) {
  if (q.items.empty() || q.is_held) return false;
  const Item& next = q.items.front();
  return !s.held_kinds.count(next.kind) && (!next.awaits || next.awaits->is_done);
}

bool is_stuck(State& s) {
  for (auto& queues : s.queues)
    for (auto& q : queues)
      if (q.is_running || is_ready(s, q)) return false;
  return true;
}

void wake_all(State& s) {
  for (auto& queues : s.queues)
    for (auto& q : queues)
      if (!q.items.empty()) q.wake.notify_one();
  s.changed.notify_all();
}

void work_on(Queue& q) {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  at::set_num_threads(1);
  State& s = state();
  Lock lock(s.lock);
  while (true) {
    q.wake.wait(lock, [&] { return is_ready(s, q); });
    Item item = std::move(q.items.front());
    q.items.pop_front();
    q.is_running = true;
    const double delay = item.kind == Kind::WORK ? 0 : s.delay_s;
    lock.unlock();
    std::string error;
    try {
      if (delay > 0) std::this_thread::sleep_for(std::chrono::duration<double>(delay));
      if (item.work) item.work();
    } catch (const c10::Error& failure) {
      error = failure.what_without_backtrace();
    } catch (const std::exception& failure) {
      error = failure.what();
    }
    item.work = nullptr;
    lock.lock();
    q.is_running = false;
    if (s.error.empty()) s.error = error;
    if (item.completes) {
      item.completes->is_done = true;
      wake_all(s);
    } else {
      s.changed.notify_all();
    }
  }
}

void push(Queue& q, Item item) {
  State& s = state();
  Lock lock(s.lock);
  if (s.is_closed) {
    if (item.completes) item.completes->is_done = true;
    return;
  }
  q.items.push_back(std::move(item));
  if (!q.has_thread) std::thread(work_on, std::ref(q)).detach();
  q.has_thread = true;
  q.wake.notify_one();
}

// Who holds something up would wait for ever: on a real device that is only slow, here it is an error.
void wait_until(Lock& lock, const std::function<bool()>& is_over) {
  State& s = state();
  const bool is_holder = s.holder == std::this_thread::get_id();
  s.changed.wait(lock, [&] { return is_over() || (is_holder && is_stuck(s)); });
  TORCH_CHECK(is_over(), "the host waits for work that is held up");
  if (std::string error = std::exchange(s.error, ""); !error.empty()) TORCH_CHECK(false, "late device: ", error);
}

}  // namespace

Queue& queue_of(const c10::Stream& stream) { return state().queues.at(stream.device_index()).at(stream.id()); }
Queue& current_queue(int device) { return state().queues.at(device).at(the_stream.at(device)); }
int device_of(const Queue& queue) { return queue.device; }
c10::Stream stream_of(const Queue& queue) {
  const c10::Device device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(queue.device));
  return c10::Stream(c10::Stream::UNSAFE, device, queue.id);
}

void launch(Queue& queue, Kind kind, std::function<void()> work) {
  use_device(queue.device);
  push(queue, {kind, std::move(work), nullptr, nullptr});
}

Recorded record(Queue& queue) {
  use_device(queue.device);
  auto recorded = std::make_shared<Recording>();
  push(queue, {Kind::WORK, nullptr, nullptr, recorded});
  return recorded;
}

void let_wait(Queue& queue, Recorded recorded) {
  use_device(queue.device);
  push(queue, {Kind::WORK, nullptr, std::move(recorded), nullptr});
}

bool is_done(const Recorded& recorded) {
  const Locked s;
  return recorded->is_done;
}

void wait_for(const Recorded& recorded) {
  check_capture("waiting for the device");
  Lock lock(state().lock);
  wait_until(lock, [&] { return recorded->is_done; });
}

void synchronize(Queue& queue) {
  use_device(queue.device);
  check_capture("waiting for a stream");
  Lock lock(state().lock);
  wait_until(lock, [&] { return queue.items.empty() && !queue.is_running; });
}

void synchronize_device(int device) {
  for (auto& queue : state().queues.at(device)) synchronize(queue);
}

int current_device() { return the_device; }

int exchange_device(int device) {
  TORCH_CHECK(device >= 0 && device < DEVICES, "there is no device ", device);
  if (device != the_device) use_device(device);
  return std::exchange(the_device, device);
}

void go_back_to_device(int device) { the_device = device; }

void use_device(int device) {
  TORCH_CHECK(!is_forked(), "Cannot re-initialize the late device in forked subprocess");
  Locked()->uses.emplace(syscall(SYS_gettid), device);
}

std::vector<std::pair<int64_t, int>> first_uses() {
  const Locked s;
  return {s->uses.begin(), s->uses.end()};
}

void forget_uses() { Locked()->uses.clear(); }

void hold_queue(Queue& queue) {
  const Locked s;
  s->holder = std::this_thread::get_id();
  queue.is_held = true;
}

void hold_kind(Kind kind) {
  const Locked s;
  s->holder = std::this_thread::get_id();
  s->held_kinds.insert(kind);
}

void release() {
  State& s = state();
  Lock lock(s.lock);
  s.holder = {};
  s.held_kinds.clear();
  for (auto& queues : s.queues)
    for (auto& q : queues) q.is_held = false;
  wake_all(s);
}

void settle() {
  Lock lock(state().lock);
  state().changed.wait(lock, [] { return is_stuck(state()); });
}

void set_delay(double seconds) { Locked()->delay_s = seconds; }

void shut_down() {
  release();
  set_delay(0);
  settle();
  Locked()->is_closed = true;
}

bool is_forked() { return getpid() != state().process; }

void begin_capture() {
  const Locked s;
  TORCH_CHECK(!s->is_capturing, "a graph is being captured already");
  s->is_capturing = true;
  s->is_spoiled = false;
  s->capturer = std::this_thread::get_id();
}

void end_capture() {
  const Locked s;
  TORCH_CHECK(std::exchange(s->is_capturing, false), "no graph is being captured");
  TORCH_CHECK(!s->is_spoiled, "operation failed due to a previous error during capture");
}

bool is_capturing() {
  const Locked s;
  return s->is_capturing && s->capturer == std::this_thread::get_id();
}

bool spoils_capture() {
  const Locked s;
  const bool is_own = s->capturer == std::this_thread::get_id();
  const bool is_unsafe = the_mode == CaptureMode::GLOBAL || (the_mode == CaptureMode::THREAD_LOCAL && is_own);
  if (!s->is_capturing || !is_unsafe) return false;
  return s->is_spoiled = true;
}

void check_capture(const char* doing) {
  TORCH_CHECK(!spoils_capture(), "operation not permitted when stream is capturing: ", doing);
}

CaptureMode exchange_capture_mode(CaptureMode mode) { return std::exchange(the_mode, mode); }

namespace {

// What torch calls an event: the last moment that was recorded with it.
struct Event {
  int device;
  Recorded last;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Stream = c10::Stream;

  static Device device(int index) { return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index)}; }
  static int index(Device device) { return device.has_index() ? device.index() : current_device(); }

  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  Device getDevice() const override { return device(current_device()); }
  Device exchangeDevice(Device to) const override { return device(exchange_device(index(to))); }
  void setDevice(Device to) const override { exchange_device(index(to)); }
  void uncheckedSetDevice(Device to) const noexcept override { go_back_to_device(to.index()); }

  Stream getStream(Device of) const override { return stream_of(current_queue(index(of))); }
  Stream getDefaultStream(Device of) const override { return stream_of(state().queues.at(index(of))[0]); }
  Stream getStreamFromGlobalPool(Device of, bool) const override { return getNewStream(of, 0); }
  Stream getNewStream(Device of, int) const override {
    use_device(index(of));
    const int64_t count = Locked()->next_stream.at(index(of))++;
    return stream_of(state().queues[index(of)][1 + count % (STREAMS - 1)]);
  }
  Stream exchangeStream(Stream to) const override {
    const Stream before = getStream(to.device());
    the_stream.at(to.device_index()) = to.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override {
    check_capture("querying a stream");
    const Queue& queue = queue_of(stream);
    use_device(queue.device);
    const Locked s;
    return queue.items.empty() && !queue.is_running;
  }
  void synchronizeStream(const Stream& stream) const override { synchronize(queue_of(stream)); }
  void synchronizeDevice(const c10::DeviceIndex index) const override { synchronize_device(index); }
  bool isStreamCapturing(const Stream&) const override { return is_capturing(); }

  void record(void** event, const Stream& stream, const c10::DeviceIndex on, const c10::EventFlag) const override {
    TORCH_CHECK(on == -1 || on == stream.device_index(), "Event device ", static_cast<int>(on),
                " does not match recording stream's device ", static_cast<int>(stream.device_index()));
    if (*event == nullptr) *event = new Event{stream.device_index(), nullptr};
    static_cast<Event*>(*event)->last = late::record(queue_of(stream));
  }
  void block(void* event, const Stream& stream) const override {
    let_wait(queue_of(stream), static_cast<Event*>(event)->last);
  }
  // These two use the thread's current device, whichever the event is of
  bool queryEvent(void* event) const override {
    check_capture("querying an event");
    use_device(current_device());
    return is_done(static_cast<Event*>(event)->last);
  }
  void synchronizeEvent(void* event) const override {
    use_device(current_device());
    wait_for(static_cast<Event*>(event)->last);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const Stream& stream) const override {
    use_memory_on(memory.get(), queue_of(stream));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace
}  // namespace late
