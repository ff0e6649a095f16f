// Rows of tables: the rules of tables alone, first values, and rounding at random.
//
// For kernels.cpp alone, which is compiled once per instruction set: everything is local to it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernel_rules.h"
#include "kernel_update.h"
#include "kernel_vectors.h"
#include "kernels.h"

namespace pyps {
namespace {

// g of each number, after weight decay.
template <bool decays, class C, class R>
inline void gradient_loop(float* __restrict g, const Byte* __restrict gradient, float factor,
                          std::size_t count, R rule, float* __restrict parameters) {
  for (std::size_t i = 0; i < count; ++i) {  // Vectorised.
    const float weighted = factor * C::decode(load<C>(gradient, i));
    g[i] = decays ? decayed(rule, weighted, parameters[i]) : weighted;
  }
}

inline void quotient_loop(float* __restrict parameters, const float* __restrict g, float rate,
                          float divisor, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {  // Vectorised.
    parameters[i] = parameters[i] - divided(rate * g[i], divisor);
  }
}

// Adagrad with one sum a row: a = a + the mean of g * g, p = p - rate * g / (sqrt(a) + eps).
//
// The mean is that of `dot`, rounded to float32. A divisor of zero and a large sum are treated as
// Adagrad treats them.
struct RowwiseAdagrad {
  PYPS_NUMBERS(rate, eps, weight_decay);

  void step(const float* g, float* p, float& a, std::size_t count) const {
    a = a + static_cast<float>(dot(g, g, count) / static_cast<double>(count));
    quotient_loop(p, g, rate, __builtin_sqrtf(a) + eps, count);
  }
};

// The update of an entry of `row_rules`. It writes no reply.
template <class R>
std::size_t update_row(float* const* arrays, Gradients gradients, Reply, std::size_t count,
                       const float* numbers) {
  R rule;
  __builtin_memcpy(&rule, numbers, sizeof rule);
  if (count == 0) return 0;
  BlockSource source(gradients);
  source.with_block(0, count, [=](auto c, const Byte* words, const Byte*, float factor) {
    using C = decltype(c);
    float g[block_max];
    if (rule.weight_decay == 0.0f) {
      gradient_loop<false, C>(g, words, factor, count, rule, arrays[0]);
    } else {
      gradient_loop<true, C>(g, words, factor, count, rule, arrays[0]);
    }
    rule.step(g, arrays[0], *arrays[1], count);
  });
  return source.left_out();
}

// p = g: what somebody else computed. The rate is not read.
struct Assign {
  PYPS_NUMBERS(rate);
  static constexpr float weight_decay = 0.0f;

  void step(float g, float& p) const { p = g; }
};

constexpr Rule row_rules[] = {
    entry("assign", "", &Assign::step),
    {"rowwise_adagrad", "accumulator", RowwiseAdagrad::numbers, update_row<RowwiseAdagrad>},
};

// The bits of column i under a key: the column counted into one half of the key, the other half
// mixed in between the two multiplications of Wellons' "lowbias32".
inline std::uint32_t random_bits(std::uint64_t key, std::uint32_t i) {
  std::uint32_t x = static_cast<std::uint32_t>(key) + i * 0x9e3779b9u;
  x ^= x >> 16;
  x *= 0x21f0aaadu;
  x ^= static_cast<std::uint32_t>(key >> 32);
  x ^= x >> 15;
  x *= 0x735a2d97u;
  return x ^ x >> 15;
}

void initial_row(float* values, std::uint64_t key, float scale, std::size_t count) {
  // Of 24 bits every number is exact, and so is its product with a power of two.
  const float step = scale * 0x1p-23f;
  const auto num = static_cast<std::uint32_t>(count);
  for (std::uint32_t i = 0; i < num; ++i) {  // Vectorised.
    const auto number = static_cast<std::int32_t>(random_bits(key, i) >> 8) - 0x800000;
    values[i] = static_cast<float>(number) * step;
  }
}

void round_row(void* __restrict words, const float* __restrict values, std::uint64_t key,
               std::size_t count) {
  const auto num = static_cast<std::uint32_t>(count);
  auto* __restrict to = static_cast<std::uint16_t*>(words);
  for (std::uint32_t i = 0; i < num; ++i) {  // Vectorised.
    const std::uint32_t all = bits_of(values[i]);
    const std::uint32_t rounded = all + (random_bits(key, i) >> 16);
    // NaN and infinity stay what they are.
    const std::uint32_t kept = (all & 0x7fffffffu) > 0x7f800000u ? all | 0x400000u : all;
    to[i] = static_cast<std::uint16_t>(((all & 0x7f800000u) == 0x7f800000u ? kept : rounded) >> 16);
  }
}

}  // namespace
}  // namespace pyps
