// The server's arithmetic: one plain loop per rule, compiled once per instruction set.
//
// Every function is a free function over pointers and a count. It neither allocates nor throws,
// keeps no state and knows nothing of Python. Arrays of float are aligned, do not overlap each
// other, and hold `count` elements. A gradient may begin at any byte.
//
// Every instruction set gives the same bits: the loops are element-wise, IEEE square root and
// division are correctly rounded everywhere, and the build forbids fused multiply-add. All
// arithmetic is in float32, rounded after each operation in the order written here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs.h"
#include "vectors.h"

namespace pyps {

// One gradient of an update's sum. The payload may begin at any byte.
struct Gradient {
  const void* payload;
  Codec codec;
  float factor;
};

// At least one. What a rule applies is g = f0 * g0 + f1 * g1 + ..., summed in this order.
//
// `guarded` where a worker that shares the memory may write to a payload while it is read: the
// payload is then copied block by block, and a block of a gradient that is not finite when it is
// copied is left out of the sum. What is finite throughout is applied to the same bits as without.
struct Gradients {
  const Gradient* first;
  std::size_t num;
  bool guarded = false;
};

// Where a rule writes the new parameters in the same pass, at any byte; null where it writes none.
struct Reply {
  void* encoded = nullptr;
  Codec codec = Codec::float32;
};

// An update rule, as kernel_rules.h defines it. Of the arrays that it updates in place the first
// are the parameters; slots, and the numbers of its formula, are in the order of their names, which
// are written "rate, eps". It returns how many numbers of the gradients were left out: 0 unless
// they are guarded.
struct Rule {
  const char* name;
  const char* slots;
  const char* numbers;
  std::size_t (*update)(float* const* arrays, Gradients gradients, Reply reply, std::size_t count,
                        const float* numbers);
};

// What tables need besides, for one row of at most 1,024 numbers. Random bits are a function of the
// key and the number's column.
struct RowKernels {
  // As a shard's rules, but each slot is one number a row, and no reply is written.
  const Rule* rules;
  std::size_t num_rules;

  // values = uniform in [-scale, scale), in steps of scale / 2^23.
  void (*initial)(float* values, std::uint64_t key, float scale, std::size_t count);

  // Rounds to bfloat16, up with a probability of the distance from the lower neighbour.
  void (*round)(void* words, const float* values, std::uint64_t key, std::size_t count);
};

struct Summary {
  double sum_of_squares;
  float min;
  float max;
};

// The functions of one instruction set.
struct Kernels {
  const char* isa;

  const CodecTraits* codecs;
  std::size_t num_codecs;

  const Rule* rules;
  std::size_t num_rules;

  // Index of the first NaN or infinity, -1 when all are finite.
  std::ptrdiff_t (*first_non_finite)(const void* gradient, Codec codec, std::size_t count);

  // Exact: every float16 and bfloat16, subnormal or not, is a float32.
  void (*decode)(float* values, const void* encoded, Codec codec, std::size_t count);

  // Rounds to nearest, ties to even; too large becomes infinity, NaN stays NaN. `encoded` may begin
  // at any byte.
  void (*encode)(void* encoded, const float* values, Codec codec, std::size_t count);

  // The sum is in float64, element i in lane i modulo 16, the lanes added in order: one value on
  // every instruction set. It is NaN when a value is; min and max pass over NaN. An empty array has
  // min = +infinity, max = -infinity.
  Summary (*summary)(const float* values, std::size_t count);

  // The memory traffic of a rule over these one to three arrays, with the least arithmetic that
  // makes each read count: a = a + g for each, with g in float32. It is there to be measured
  // against.
  void (*bandwidth)(float* const* arrays, std::size_t num_arrays, const void* gradient,
                    std::size_t count);

  VectorKernels vectors;

  RowKernels rows;
};

}  // namespace pyps
