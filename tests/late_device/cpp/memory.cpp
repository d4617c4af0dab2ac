#include "memory.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace late {
namespace {

constexpr size_t PAGE = 4096;
constexpr int GARBAGE = 0xCB;  // what free memory holds

struct Block {
  char* address;  // of tensors: no access
  char* reached;  // the same bytes, for the work on the device
  size_t size;
  Queue* owner;  // in whose order the memory is used again
  std::set<Queue*> users;
};

struct PinnedBlock {
  char* address;
  size_t size;
  bool is_free;
  std::vector<Recorded> uses;
};

struct State {
  std::mutex lock;
  std::map<uintptr_t, Block*> blocks;
  std::multimap<std::pair<Queue*, size_t>, Block*> cache;
  std::array<size_t, DEVICES> limit{SIZE_MAX, SIZE_MAX}, allocated{}, most_allocated{};
  std::map<uintptr_t, PinnedBlock> pinned;
  std::map<uintptr_t, size_t> registered;
};

State& state() {
  static State& the_state = *new State;  // never destroyed, see there
  return the_state;
}

// The state, for as long as nobody else has it.
struct Locked {
  std::unique_lock<std::mutex> lock{state().lock};
  State* operator->() const { return &state(); }
};

size_t pages(size_t size) { return (size + PAGE - 1) / PAGE * PAGE; }

// The entry of a map that starts at an address or before it, if it reaches so far.
template <class Map, class Size>
typename Map::iterator find(Map& map, const void* address, Size size) {
  auto after = map.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (after == map.begin()) return map.end();
  auto found = std::prev(after);
  return reinterpret_cast<uintptr_t>(address) - found->first < size(found->second) ? found : map.end();
}

Block& find_block(const Locked& s, const void* address) {
  auto found = find(s->blocks, address, [](Block* block) { return block->size; });
  TORCH_CHECK(found != s->blocks.end(), "late device: an illegal memory access was encountered at ", address);
  return *found->second;
}

Block* map_block(size_t size, Queue* owner) {
  const int file = static_cast<int>(syscall(SYS_memfd_create, "late", 0));
  TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(size)) == 0, "late device: no memory file");
  void* address = mmap(nullptr, size, PROT_NONE, MAP_SHARED, file, 0);
  void* reached = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  TORCH_CHECK(address != MAP_FAILED && reached != MAP_FAILED, "late device: cannot map ", size, " bytes");
  return new Block{static_cast<char*>(address), static_cast<char*>(reached), size, owner, {}};
}

void give_back(Block* block) {
  const Locked s;
  s->allocated[device_of(*block->owner)] -= block->size;
  s->cache.emplace(std::make_pair(block->owner, block->size), block);
}

// As CUDA's caching allocator: at once for later work of the queue that the memory was allocated on, and after the work
// so far of other queues only if these were told to it. What still reads the memory from elsewhere finds garbage.
void free_block(void* context) {
  if (is_forked()) return;
  auto* block = static_cast<Block*>(context);
  auto spoil = [block] { std::memset(block->reached, GARBAGE, block->size); };
  if (block->users.empty()) {
    launch(*block->owner, Kind::WORK, spoil);
    give_back(block);
    return;
  }
  auto users = std::exchange(block->users, {});
  auto left = std::make_shared<std::atomic<size_t>>(users.size());
  for (Queue* user : users)
    launch(*user, Kind::WORK, [block, left, spoil] {
      if (--*left == 0) {
        spoil();
        give_back(block);
      }
    });
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t wanted) override {
    const int device = current_device();
    const c10::Device of(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device));
    if (wanted == 0) return {nullptr, of};
    use_device(device);
    Queue& owner = current_queue(device);
    const size_t size = pages(wanted);
    const Locked s;
    TORCH_CHECK_WITH(OutOfMemoryError, s->allocated[device] + size <= s->limit[device], "late device ", device,
                     " is out of memory: it has ", s->limit[device], " bytes, of which ", s->allocated[device],
                     " are in use, and ", wanted, " are asked for");
    auto cached = s->cache.find({&owner, size});
    Block* block = cached == s->cache.end() ? map_block(size, &owner) : cached->second;
    if (cached != s->cache.end()) s->cache.erase(cached);
    s->blocks[reinterpret_cast<uintptr_t>(block->address)] = block;
    s->allocated[device] += size;
    s->most_allocated[device] = std::max(s->most_allocated[device], s->allocated[device]);
    return {block->address, block, free_block, of};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override {
    launch(current_queue(current_device()), Kind::WORK,
           [to = reach(to), from = reach(from), size] { std::memcpy(to, from, size); });
  }
};

DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(c10::kPrivateUse1, &device_allocator)

// As CUDA's: a block is used again when the copies have ended that were told to it.
void free_pinned(void* address) { Locked()->pinned.at(reinterpret_cast<uintptr_t>(address)).is_free = true; }

bool is_unused(PinnedBlock& block) {
  block.uses.erase(std::remove_if(block.uses.begin(), block.uses.end(), is_done), block.uses.end());
  return block.is_free && block.uses.empty();
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t wanted) override {
    if (wanted == 0) return {nullptr, c10::kCPU};
    check_capture("allocating pinned memory");
    use_device(current_device());
    size_t size = PAGE;
    while (size < wanted) size *= 2;
    const Locked s;
    auto found = std::find_if(s->pinned.begin(), s->pinned.end(),
                              [&](auto& entry) { return entry.second.size == size && is_unused(entry.second); });
    if (found == s->pinned.end()) {
      void* made = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      TORCH_CHECK(made != MAP_FAILED, "late device: cannot pin ", size, " bytes");
      found = s->pinned.emplace(reinterpret_cast<uintptr_t>(made), PinnedBlock{static_cast<char*>(made), size}).first;
    }
    found->second.is_free = false;
    std::memset(found->second.address, GARBAGE, wanted);
    return {found->second.address, found->second.address, free_pinned, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return free_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

}  // namespace

char* reach(const void* address) {
  const Locked s;
  Block& block = find_block(s, address);
  return block.reached + (static_cast<const char*>(address) - block.address);
}

void use_memory_on(const void* address, Queue& queue) {
  const Locked s;
  Block& block = find_block(s, address);
  if (&queue != block.owner) block.users.insert(&queue);
}

void empty_cache() {
  for (int device = 0; device < DEVICES; device++) synchronize_device(device);
  const Locked s;
  for (auto& [key, block] : s->cache) {
    s->blocks.erase(reinterpret_cast<uintptr_t>(block->address));
    munmap(block->address, block->size);
    munmap(block->reached, block->size);
    delete block;
  }
  s->cache.clear();
}

void set_memory_limit(int device, size_t bytes) { Locked()->limit.at(device) = bytes; }
size_t allocated(int device) { return Locked()->allocated.at(device); }
size_t most_allocated(int device) { return Locked()->most_allocated.at(device); }

void forget_most_allocated() {
  const Locked s;
  s->most_allocated = s->allocated;
}

c10::Allocator* pinned_allocator() {
  static PinnedAllocator allocator;
  return &allocator;
}

bool is_pinned(const void* address) { return is_pinned(address, 0); }

bool is_pinned(const void* address, size_t size) {
  const Locked s;
  auto own = find(s->pinned, address, [](const PinnedBlock& block) { return block.size; });
  if (own != s->pinned.end()) return true;
  auto other = find(s->registered, address, [](size_t bytes) { return bytes; });
  if (other == s->registered.end()) return false;
  TORCH_CHECK(reinterpret_cast<uintptr_t>(address) + size <= other->first + other->second,
              "late device: invalid argument: a copy goes beyond the end of registered memory");
  return true;
}

void keep_pinned_until(const void* address, Recorded recorded) {
  const Locked s;
  auto own = find(s->pinned, address, [](const PinnedBlock& block) { return block.size; });
  if (own != s->pinned.end()) own->second.uses.push_back(std::move(recorded));
}

void add_pinned(uintptr_t address, size_t size) { Locked()->registered[address] = size; }
void remove_pinned(uintptr_t address) { Locked()->registered.erase(address); }

}  // namespace late
