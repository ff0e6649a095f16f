// Arithmetic on vectors that lie on the servers: Sandblaster's instructions (Dean et al. 2012,
// section 4.2). Compiled once per instruction set, and free functions as those of kernels.h.
//
// Numbers are float32. What is computed of an element is computed in float64, rounded after each
// operation in the order written here, and then rounded once to float32. z may be the same array as
// others are; else it shares no memory with them.
//
// A sum over elements is in float64, element i in lane i modulo `num_lanes`, the lanes added in
// order: one value on every instruction set.
#pragma once

#include <cstddef>

namespace pyps {

struct Term {
  double scalar;
  const float* vector;
};

// Two vectors of a list, as indices into it.
struct Pair {
  std::size_t left;
  std::size_t right;
};

constexpr std::size_t num_lanes = 16;

// How many elements of each vector are multiplied with each other before the next ones are read:
// those of some 40 vectors stay in a core's own caches.
constexpr std::size_t gram_block_max = 512;

// The memory that `gram` works in: the vectors' blocks in float64 and the pairs' lanes.
constexpr std::size_t gram_scratch_count(std::size_t num_vectors, std::size_t num_pairs) {
  return num_vectors * gram_block_max + num_pairs * num_lanes;
}

// The functions of one instruction set.
struct VectorKernels {
  // z = x + a * y
  void (*move)(float* z, const float* x, double a, const float* y, std::size_t count);

  // The sum of x * y.
  double (*dot)(const float* x, const float* y, std::size_t count);

  // The sum of |x|.
  double (*norm1)(const float* x, std::size_t count);

  // The largest |x|: 0 of no elements, NaN where one is NaN.
  double (*norm_inf)(const float* x, std::size_t count);

  // z = (0 + s0 * v0 + s1 * v1 + ...) / divisor, in one pass over memory.
  void (*combine)(float* z, const Term* terms, std::size_t num, double divisor, std::size_t count);

  // sums[k] = the sum of x * y for the k-th pair of vectors, to the bits that `dot` gives, in one
  // pass over memory. `scratch` has room for gram_scratch_count(num_vectors, num_pairs) numbers.
  void (*gram)(double* sums, const Pair* pairs, std::size_t num_pairs, const float* const* vectors,
               std::size_t num_vectors, std::size_t count, double* scratch);
};

}  // namespace pyps
