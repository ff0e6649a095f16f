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

#include "vectors.h"

namespace pyps {

// How one number is encoded on the wire, little-endian. The values are those of the wire contract.
enum class Codec : int { float32 = 1, float16 = 2, bfloat16 = 3 };

constexpr std::size_t size_of(Codec codec) { return codec == Codec::float32 ? 4 : 2; }

// One gradient of an update's sum. The payload may begin at any byte.
struct Gradient {
  const void* payload;
  Codec codec;
  float factor;
};

// At least one. What a rule applies is g = f0 * g0 + f1 * g1 + ..., summed in this order.
//
// `guarded` where somebody may write to a payload while it is read, memory shared with a worker: it
// is then copied block by block, and a block of a gradient that is not finite when it is copied is
// left out of the sum. What is finite throughout is applied to the same bits as without.
struct Gradients {
  const Gradient* first;
  std::size_t num;
  bool guarded = false;
};

// Where a rule writes the parameters that it made, in the same pass; `encoded` is null where nobody
// wants them, and may otherwise be any byte.
struct Reply {
  void* encoded = nullptr;
  Codec codec = Codec::float32;
};

// Where weight_decay is not zero, g = g + weight_decay * p before all else, once per update.
//
// `gradient_share` is 1 - the constant beside it, rounded once: in float32 1 - 0.999 is no 0.001.

struct SgdOptions {
  float rate;
  float weight_decay;
};

struct MomentumOptions {
  float rate;
  float momentum;
  float gradient_share;  // 1 - dampening
  float weight_decay;
};

struct HeavyBallOptions {
  float rate;
  float momentum;
  float weight_decay;
};

struct NesterovOptions {
  float rate;
  float momentum;
  float weight_decay;
};

struct AdagradOptions {
  float rate;
  float eps;
  float weight_decay;
};

struct RmspropOptions {
  float rate;
  float decay;
  float gradient_share;
  float eps;
  float weight_decay;
};

struct AdamOptions {
  float rate;  // divided by 1 - beta1^t, t the number of updates with this one
  float beta1;
  float gradient_share1;
  float beta2;
  float gradient_share2;
  float root_scale;  // 1 / sqrt(1 - beta2^t)
  float eps;
  float weight_decay;
};

// weight_decay is multiplied by the rate as it was before the division.
struct AdamwOptions : AdamOptions {
  float parameter_share;  // 1 - weight_decay
};

struct Summary {
  double sum_of_squares;
  float min;
  float max;
};

// The functions of one instruction set.
struct Kernels {
  const char* isa;

  // Each rule returns how many numbers of its gradients were left out: 0 unless they are guarded.

  // p = p - rate * g
  std::size_t (*sgd)(float* parameters, Gradients gradients, Reply reply, std::size_t count,
                     SgdOptions options);

  // v = momentum * v + gradient_share * g
  // p = p - rate * v
  std::size_t (*momentum)(float* parameters, float* velocity, Gradients gradients, Reply reply,
                          std::size_t count, MomentumOptions options);

  // v = momentum * v + rate * g
  // p = p - v
  std::size_t (*heavy_ball)(float* parameters, float* velocity, Gradients gradients, Reply reply,
                            std::size_t count, HeavyBallOptions options);

  // The parameters are the look-ahead point, at which gradients are taken.
  //
  //   v = momentum * v + g
  //   p = p - rate * (g + momentum * v)
  std::size_t (*nesterov)(float* parameters, float* velocity, Gradients gradients, Reply reply,
                          std::size_t count, NesterovOptions options);

  // Dean et al. 2012, section 4.1. The sum includes the gradient at hand; eps stands outside the
  // root.
  //
  //   a = a + g * g
  //   d = sqrt(a) + eps
  //   p = p - (rate * g) / d      if d != 0
  //   p = p                       if d == 0
  //
  // d is zero only with eps = 0, for a gradient that is zero or whose square rounds to zero. Where
  // g * g is too large for float32, a becomes infinite and the parameter stands still from then on.
  // The next three rules treat d and large squares alike.
  std::size_t (*adagrad)(float* parameters, float* accumulator, Gradients gradients, Reply reply,
                         std::size_t count, AdagradOptions options);

  // s = decay * s + gradient_share * (g * g)
  // d = sqrt(s) + eps
  // p = p - (rate * g) / d
  std::size_t (*rmsprop)(float* parameters, float* square_average, Gradients gradients, Reply reply,
                         std::size_t count, RmspropOptions options);

  // m = beta1 * m + gradient_share1 * g
  // v = beta2 * v + gradient_share2 * (g * g)
  // d = sqrt(v) * root_scale + eps
  // p = p - (rate * m) / d
  std::size_t (*adam)(float* parameters, float* first_moment, float* second_moment,
                      Gradients gradients, Reply reply, std::size_t count, AdamOptions options);

  // p = parameter_share * p, which no moment sees; then as adam without decay.
  std::size_t (*adamw)(float* parameters, float* first_moment, float* second_moment,
                       Gradients gradients, Reply reply, std::size_t count, AdamwOptions options);

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
};

}  // namespace pyps
