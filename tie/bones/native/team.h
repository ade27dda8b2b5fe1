// A team of threads that go through one forward step together.
//
// One parallel region a step, and inside it barriers: at hundreds of short phases per step, entering a region for each
// would cost more than the work. Whoever waits spins first, for the wait is mostly microseconds, then sleeps in the
// kernel, for on a shared machine the thread that is waited for may have lost its core.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace tie {

// A number that only changes, and can be waited for.
class Turn {
 public:
  uint32_t now() const { return number_.load(std::memory_order_acquire); }

  void move_to(uint32_t next) {
    number_.store(next);
    number_.notify_all();  // does nothing where nobody sleeps
  }

  void wait_beyond(uint32_t seen, int spins) {
    for (int i = 0; i < spins; ++i) {
      if (now() != seen) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    number_.wait(seen);
  }

 private:
  std::atomic<uint32_t> number_{0};
};

class Team {
 public:
  // The caller of run() is the first of `threads`.
  Team(int threads, int spins) : threads_(threads), spins_(spins) {
    try {
      for (int member = 1; member < threads; ++member) workers_.emplace_back([this, member] { work(member); });
    } catch (...) {
      end();
      throw;
    }
  }
  ~Team() { end(); }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int threads() const { return threads_; }

  // Has the first `members` threads call body(member), and returns when all are done.
  void run(int members, const std::function<void(int)>& body) {
    body_ = &body;
    members_ = members;
    if (members > 1) region_.move_to(region_.now() / kMembers * kMembers + kMembers + members);
    body(0);
    meet();
  }

  // Inside a region. Waits for all members. What any did before, all see afterwards.
  void meet() {
    const int members = members_;  // read before this one arrives: afterwards the next region may begin
    const uint32_t seen = barrier_.now();
    if (arrived_.fetch_add(1) < members - 1) return barrier_.wait_beyond(seen, spins_);
    arrived_.store(0, std::memory_order_relaxed);
    taken_.store(0, std::memory_order_relaxed);
    barrier_.move_to(seen + 1);
  }

  // Inside a region. Calls work(first, last) for pieces of `grain` items until all are taken, then waits for all
  // members. Whoever is early takes more: cores are not equally fast when others use them too.
  template <class Work>
  void share(int items, int grain, Work work) {
    for (int first; (first = taken_.fetch_add(grain, std::memory_order_relaxed)) < items;)
      work(first, first + grain < items ? first + grain : items);
    meet();
  }

 private:
  static constexpr uint32_t kMembers = 2048;  // the turn of a region holds how many take part in it: one word, read at once

  void work(int member) {
    uint32_t seen = 0;
    for (bool busy = false;;) {
      region_.wait_beyond(seen, busy ? spins_ : 0);
      seen = region_.now();
      if (ending_) return;
      busy = member < static_cast<int>(seen % kMembers);
      if (!busy) continue;
      (*body_)(member);
      meet();
    }
  }

  void end() {
    ending_ = true;
    region_.move_to(region_.now() + kMembers);
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
  }

  const int threads_, spins_;
  std::vector<std::thread> workers_;
  const std::function<void(int)>* body_ = nullptr;
  int members_ = 1;
  bool ending_ = false;
  alignas(64) Turn region_;
  alignas(64) Turn barrier_;
  std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> taken_{0};
};

}  // namespace tie
