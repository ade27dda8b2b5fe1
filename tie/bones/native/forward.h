// The forward step and the memory that it works in.
#pragma once

#include <vector>

#include "linear.h"
#include "team.h"

namespace tie {

// The memory that steps work in, piece by piece, in the same order each time: a step no larger than those before asks the
// system for nothing. What is in a piece stays in it until it has to grow; then it is zero.
class Workspace {
 public:
  void begin() { next_ = 0; }

  // The next piece: at least `count` items, on a cache line of their own.
  template <class T>
  T* take(size_t count) {
    if (next_ == pieces_.size()) pieces_.emplace_back();
    std::vector<Line>& piece = pieces_[next_++];
    const size_t lines = (count * sizeof(T) + sizeof(Line) - 1) / sizeof(Line);
    if (lines > piece.size()) {
      std::vector<Line>().swap(piece);
      piece.resize(lines);
    }
    return reinterpret_cast<T*>(piece.data());
  }

 private:
  struct alignas(64) Line {
    uint8_t bytes[64];
  };
  std::vector<std::vector<Line>> pieces_;
  size_t next_ = 0;
};

// Runs a checked batch. Throws std::bad_alloc before anything is changed.
void forward(const Model& model, const Batch& batch, Workspace& space, Team& team);

}  // namespace tie
