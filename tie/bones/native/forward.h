// The forward step and the memory that it works in.
#pragma once

#include <cstdlib>
#include <cstring>
#include <new>

#include "linear.h"
#include "team.h"

namespace tie {

// Memory that only grows. What is in it is lost when it does.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  // At least `count` items, on a cache line of their own; new ones are zero.
  T* reserve(size_t count) {
    if (count > size_) {
      std::free(data_);
      size_ = 0;
      const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
      data_ = static_cast<T*>(std::aligned_alloc(64, bytes));
      if (!data_) throw std::bad_alloc();
      std::memset(static_cast<void*>(data_), 0, bytes);
      size_ = count;
    }
    return data_;
  }
  T* data() const { return data_; }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

// Rows of one slice that attend together, and the blocks that they see.
struct Piece {
  int slice, row, rows;
  int first_block, last_block;  // of the slice's table
  int splits;                   // among how many tasks, for each key head
  size_t part;                  // where its parts begin
};

struct AttentionTask {
  int piece, head, split;
};

// Room for activations.
class ActivationBuffer {
 public:
  // For `rows` rows of `columns` columns, of whatever weights; and for `members` blocks of one thread each.
  void reserve(int rows, int columns, int members = 0) {
    const size_t blocks = round_up(rows, Activations::kSlots) / Activations::kSlots;
    const size_t all = blocks > static_cast<size_t>(members) ? blocks : members;
    columns_ = round_up(columns, kGroup);
    data_.reserve(all * block_bytes());
    scales_.reserve(all * block_scales());
  }
  // `rows` rows for a product with `weights`, from the block of a member on.
  Activations take(int rows, const Matrix& weights, int member = 0) const {
    Activations made{data_.data() + member * block_bytes(), scales_.data() + member * block_scales(), 0, 0, 0};
    made.shape(rows, weights);
    return made;
  }

 private:
  size_t block_bytes() const { return static_cast<size_t>(Activations::kSlots) * columns_ * sizeof(uint16_t); }
  size_t block_scales() const { return static_cast<size_t>(Activations::kSlots) * 2 * (columns_ / kGroup); }

  Buffer<uint8_t> data_;
  Buffer<float> scales_;
  int columns_ = 0;
};

struct Workspace {
  Buffer<float> residual, qkv, angles, parts, member_rows;
  Buffer<uint8_t> scratch;
  ActivationBuffer input, mixed, inner;
  Buffer<Piece> pieces;
  Buffer<AttentionTask> tasks;
  Buffer<std::atomic<int>> finished;  // tasks of a piece
};

// Runs a checked step. Throws std::bad_alloc before anything is changed.
void forward(const Model& model, const Step& step, Workspace& workspace, Team& team);

}  // namespace tie
