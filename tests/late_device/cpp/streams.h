// Streams of two devices: each is a thread that runs its work in order, later than the host, and as late as a test likes.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace late {

constexpr int DEVICES = 2;
constexpr int STREAMS = 256;  // of a device, given out in turn after the default one; tests do not need that many

enum class Kind { WORK, TO_HOST, TO_DEVICE };

struct Queue;
struct Recording;  // what an event stands for: a moment in the work of a queue
using Recorded = std::shared_ptr<Recording>;

Queue& queue_of(const c10::Stream& stream);
Queue& current_queue(int device);
int device_of(const Queue& queue);
c10::Stream stream_of(const Queue& queue);

// Launches work, as the device of the queue.
void launch(Queue& queue, Kind kind, std::function<void()> work);
Recorded record(Queue& queue);
void let_wait(Queue& queue, Recorded recorded);  // what is launched there from now on
bool is_done(const Recorded& recorded);
void wait_for(const Recorded& recorded);  // the host; raises what has failed in any queue
void synchronize(Queue& queue);
void synchronize_device(int device);

// The current device of a thread. To choose one makes a context on it, as since CUDA 12; to go back to one does not.
int current_device();
int exchange_device(int device);
void go_back_to_device(int device);
void use_device(int device);  // counts each thread's first use of each device, which makes a context there
std::vector<std::pair<int64_t, int>> first_uses();
void forget_uses();

// For tests: holds up all work of a queue, or each copy of a kind in any queue.
void hold_queue(Queue& queue);
void hold_kind(Kind kind);
void release();
void settle();  // waits until nothing goes on but what is held
void set_delay(double seconds);  // of each copy between host and device, before it reads a byte
void shut_down();
bool is_forked();  // whether this process is not the one that loaded the device, and has no threads for it

// Graph capture in global mode: while it lasts, what is unsafe in the mode of its thread fails, and spoils the graph.
enum class CaptureMode { GLOBAL, THREAD_LOCAL, RELAXED };
void begin_capture();
void end_capture();
bool is_capturing();
bool spoils_capture();
void check_capture(const char* doing);
CaptureMode exchange_capture_mode(CaptureMode mode);

}  // namespace late
