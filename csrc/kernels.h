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

namespace pyps {

// How one number is encoded on the wire, little-endian. The values are those of the wire contract.
enum class Codec : int { float32 = 1, float16 = 2, bfloat16 = 3 };

constexpr std::size_t size_of(Codec codec) { return codec == Codec::float32 ? 4 : 2; }

struct SgdOptions {
  float rate;
};

struct AdagradOptions {
  float rate;
  float eps;
};

struct Summary {
  double sum_of_squares;
  float min;
  float max;
};

// The functions of one instruction set.
struct Kernels {
  const char* isa;

  // p = p - rate * g
  void (*sgd)(float* parameters, const void* gradient, Codec codec, std::size_t count,
              SgdOptions options);

  // Dean et al. 2012, section 4.1. The sum includes the gradient at hand; eps stands outside the
  // root.
  //
  //   a = a + g * g
  //   d = sqrt(a) + eps
  //   p = p - (rate * g) / d      if d != 0
  //   p = p                       if d == 0
  //
  // d is zero only with eps = 0, for a gradient that is zero or whose square rounds to zero.
  void (*adagrad)(float* parameters, float* accumulator, const void* gradient, Codec codec,
                  std::size_t count, AdagradOptions options);

  // Index of the first NaN or infinity, -1 when all are finite.
  std::ptrdiff_t (*first_non_finite)(const void* gradient, Codec codec, std::size_t count);

  // Exact: every float16 and bfloat16, subnormal or not, is a float32.
  void (*decode)(float* values, const void* encoded, Codec codec, std::size_t count);

  // Rounds to nearest, ties to even; too large becomes infinity, NaN stays NaN. `encoded` may begin
  // at any byte.
  void (*encode)(void* encoded, const float* values, Codec codec, std::size_t count);

  // The sum is in float64 and is NaN when a value is; min and max pass over NaN. An empty array has
  // min = +infinity, max = -infinity.
  Summary (*summary)(const float* values, std::size_t count);

  // The memory traffic of `adagrad` with the least arithmetic that makes each read count:
  // a = a + g, p = p + g, with g in float32. It is there to be measured against.
  void (*bandwidth)(float* parameters, float* accumulator, const void* gradient, std::size_t count);
};

}  // namespace pyps
