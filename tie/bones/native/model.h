// What a model is to the forward step: its shape, its weights where they lie, and the blocks of keys and values.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

namespace tie {

constexpr int kTileRows = 16;     // output rows of a matrix that are stored and computed together
constexpr int kVectorBytes = 4 * kTileRows;  // four bytes of each row of a tile lie side by side
constexpr int kGroup = 32;        // values along a row that share a scale
constexpr int kBlockTokens = 16;  // tokens of a block of keys and values
constexpr int kMaxHeadDim = 256;
constexpr int kMaxGroupSize = 32;  // query heads on one key head

constexpr int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// Filled in Python, field by field: see library.py.
struct Shape {
  int32_t hidden, intermediate, layers, heads, kv_heads, head_dim, vocab, context;
  int32_t window;  // tokens that a token attends to, itself included; 0: all
  float eps;       // of every RMSNorm

  int group_size() const { return heads / kv_heads; }
  int query_width() const { return heads * head_dim; }
  int all_heads() const { return heads + 2 * kv_heads; }  // of queries, of keys, of values: as `qkv` makes them
  int whole_dim() const { return round_up(head_dim, kTileRows); }  // a head's rows of `qkv`, and its values in a block

  // The first position that a token attends to.
  int first_key(int position) const { return window ? std::max(position + 1 - window, 0) : 0; }

  // A block holds, for every layer, [kv head] keys and [kv head] values, in bf16, in the order in which the kernels read:
  //   keys    [head_dim / 2][token][2]         16 tokens side by side, a pair of dimensions each
  //   values  [token / 2][whole_dim][2]        16 dimensions side by side, a pair of tokens each
  size_t key_values() const { return static_cast<size_t>(kBlockTokens) * head_dim; }
  size_t value_values() const { return static_cast<size_t>(kBlockTokens) * whole_dim(); }
  size_t layer_values() const { return kv_heads * (key_values() + value_values()); }
  size_t block_bytes() const { return layers * layer_values() * sizeof(uint16_t); }

  bool sound() const {
    constexpr int kMost = 1 << 24;  // products of three of them fit 64 bits (in fact two and a factor of 32)
    for (int32_t count : {hidden, intermediate, layers, heads, kv_heads, head_dim, vocab, context})
      if (count < 1 || count > kMost) return false;
    if (heads > 4096 || layers > 4096) return false;
    return heads % kv_heads == 0 && group_size() <= kMaxGroupSize && head_dim % 2 == 0 && head_dim <= kMaxHeadDim &&
           window >= 0 && eps > 0 && eps < 1;
  }
};

enum class Format : int32_t { kBf16 = 0, kQ4 = 1, kQ8 = 2 };
constexpr int kFormats = 3;

// A matrix in tiles of 16 output rows; missing rows and columns are zero. A tile is
//   bf16  [columns / 2][16 rows][2]
//   q4    [group][4][16 rows][4 bytes], byte j holding the group's values 8i+j (low) and 8i+4+j (high nibble), unsigned;
//         then [group][16 scales][16 minima] in binary16: value = scale * nibble + minimum
//   q8    [group][8][16 rows][4 bytes], signed; then [group][16 scales] in binary16
// and begins on a multiple of 64 bytes.
struct Matrix {
  const uint8_t* data = nullptr;
  Format format = Format::kBf16;
  int tiles = 0;
  int columns = 0;  // a multiple of kGroup

  Matrix() = default;
  Matrix(Format format, int rows, int columns)
      : format(format), tiles(round_up(rows, kTileRows) / kTileRows), columns(round_up(columns, kGroup)) {}

  int groups() const { return columns / kGroup; }
  size_t code_bytes() const {  // of a tile, in front of its scales
    const size_t values = static_cast<size_t>(columns) * kTileRows;
    return format == Format::kBf16 ? values * 2 : format == Format::kQ4 ? values / 2 : values;
  }
  size_t scale_bytes() const {  // of a group of a tile
    return format == Format::kBf16 ? 0 : format == Format::kQ4 ? 4 * kTileRows : 2 * kTileRows;
  }
  size_t tile_bytes() const { return (code_bytes() + groups() * scale_bytes() + 63) / 64 * 64; }
  size_t bytes() const { return tiles * tile_bytes(); }
  // Where a row's first word lies, and its first scale; those of the rows behind it in the tile follow at once.
  const uint8_t* codes(int row) const { return data + row / kTileRows * tile_bytes() + row % kTileRows * 4; }
  const uint8_t* scales(int row) const {
    return data + row / kTileRows * tile_bytes() + code_bytes() + row % kTileRows * 2;
  }
};

// Vectors are float32 and padded with zeros to a multiple of kGroup. Null: the model has none.
struct Layer {
  Matrix qkv;          // head by head, each in tiles of its own
  Matrix gate_up;      // a tile of the gate and a tile of the up projection in turn
  Matrix output, down;
  const float* attention_norm = nullptr;
  const float* feed_forward_norm = nullptr;
  const float* qkv_bias = nullptr;  // [heads][head_dim]
  const float* output_bias = nullptr;
  const float* query_norm = nullptr;  // if queries and keys are normalised before they are rotated
  const float* key_norm = nullptr;
};

struct Model {
  Shape shape;
  uint16_t* cache;  // [blocks] of Shape::block_bytes()
  int blocks;
  std::vector<Layer> layers;
  Matrix embedding, head;
  const float* norm = nullptr;
  const float* frequencies = nullptr;  // [head_dim / 2], of the rotary embedding, padded too

  Model(const Shape& shape, uint16_t* cache, int blocks)
      : shape(shape), cache(cache), blocks(blocks), layers(shape.layers) {}

  uint16_t* keys(int64_t block, int layer, int head) const {
    return cache + block * (shape.layers * shape.layer_values()) + layer * shape.layer_values() +
           head * shape.key_values();
  }
  uint16_t* values(int64_t block, int layer, int head) const {
    return keys(block, layer, 0) + shape.kv_heads * shape.key_values() + head * shape.value_values();
  }
};

// One forward pass: the next tokens of some sequences. Filled in Python, field by field: see library.py.
struct Batch {
  // [slices]: how many tokens each sequence has here, the position of the first, blocks of its table, and how many of its
  // last tokens need logits.
  const int64_t *counts, *starts, *table_sizes, *logit_counts;
  const int64_t *tokens, *blocks;  // [rows], [table_blocks]: the slices' tokens and tables, one after another
  const int64_t* copied;           // [copies][2], blocks: the first goes to the second, before anything else
  float* logits;                   // [wanted][vocab]
  int64_t slices, rows, table_blocks, copies, wanted, threads;
};

}  // namespace tie
