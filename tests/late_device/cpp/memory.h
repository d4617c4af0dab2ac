// Memory of the devices, which the host cannot touch, and host memory that the devices reach by themselves.
#pragma once

#include "streams.h"

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>

namespace late {

// The address at which work on a device finds what has this address in tensors. No host thread may touch the latter.
char* reach(const void* address);
void use_memory_on(const void* address, Queue& queue);  // what `Tensor.record_stream` says to the allocator
void empty_cache();
void set_memory_limit(int device, size_t bytes);
size_t allocated(int device);
size_t most_allocated(int device);
void forget_most_allocated();

c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);
// Whether a device reaches all these bytes by itself; raises an error if that is so up to the middle of them only.
bool is_pinned(const void* address, size_t size);
void keep_pinned_until(const void* address, Recorded recorded);  // its block, should it be freed meanwhile

// Host memory of others, which counts as pinned from now on, or no more.
void add_pinned(uintptr_t address, size_t size);
void remove_pinned(uintptr_t address);

}  // namespace late
