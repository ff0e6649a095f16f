// The walk over memory that every rule shares: gradients are read, summed and applied in one pass.
//
// For kernels.cpp alone, which is compiled once per instruction set: everything is local to it.
#pragma once

#include "kernel_codecs.h"
#include "kernel_memory.h"
#include "kernel_rules.h"

namespace pyps {
namespace {

// Elements of an update between two prefetches: more than compilers unroll before they vectorise.
constexpr std::size_t update_piece = 2 * cache_line_size / sizeof(float);

// Every rule's loop, for one codec. Without decay the parameter does not enter the gradient at all:
// zero times infinity would be NaN.
template <bool decays, class C, class Options, class... Float>
inline void update_loop(const Byte* __restrict gradient, float factor, std::size_t count,
                        Options options, float* __restrict parameters, Float* __restrict... slots) {
  for (std::size_t i = 0; i < count; ++i) {  // Vectorised.
    float g = factor * C::decode(load<C>(gradient, i));
    if constexpr (decays) g = decayed(options, g, parameters[i]);
    step(options, g, parameters[i], slots[i]...);
  }
}

template <bool decays, class C, class Options, class... Float>
inline void update_encoded(const Byte* gradient, float factor, std::size_t count, Options options,
                           float* parameters, Float*... slots) {
  for_each_piece<update_piece>(count, [=](std::size_t start, std::size_t size) {
    const Byte* piece = gradient + start * sizeof(typename C::Word);
    prefetch(parameters + start, update_distance, size * sizeof(float));
    (prefetch(slots + start, update_distance, size * sizeof(float)), ...);
    prefetch(piece, update_distance, size * sizeof(typename C::Word));
    update_loop<decays, C>(piece, factor, size, options, parameters + start, (slots + start)...);
  });
}

template <bool adds, class C>
inline void sum_loop(float* __restrict sum, const Byte* __restrict gradient, float factor,
                     std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {  // Vectorised.
    const float weighted = factor * C::decode(load<C>(gradient, i));
    sum[i] = adds ? sum[i] + weighted : weighted;
  }
}

template <bool adds>
void sum_encoded(float* sum, const Gradient& gradient, std::size_t start, std::size_t count) {
  with_codec(gradient.codec, [&](auto c) {
    using C = decltype(c);
    constexpr std::size_t word_size = sizeof(typename C::Word);
    const Byte* words = static_cast<const Byte*>(gradient.payload) + start * word_size;
    for_each_piece<update_piece>(
        count, [=, factor = gradient.factor](std::size_t at, std::size_t size) {
          prefetch(words + at * word_size, update_distance, size * word_size);
          sum_loop<adds, C>(sum + at, words + at * word_size, factor, size);
        });
  });
}

// Elements that are summed before they are applied: a sum that stays in the nearest cache, beside
// the arrays' own pieces.
constexpr std::size_t sum_block_max = 1024;

template <bool decays, class Options, class... Float>
void update_summed(Gradients gradients, std::size_t count, Options options, float* parameters,
                   Float*... slots) {
  alignas(cache_line_size) float sum[sum_block_max];
  for (std::size_t start = 0; start < count; start += sum_block_max) {
    const std::size_t left = count - start;
    const std::size_t size = left < sum_block_max ? left : sum_block_max;
    sum_encoded<false>(sum, gradients.first[0], start, size);
    for (std::size_t i = 1; i < gradients.num; ++i) {
      sum_encoded<true>(sum, gradients.first[i], start, size);
    }
    update_encoded<decays, Float32>(reinterpret_cast<const Byte*>(sum), 1.0f, size, options,
                                    parameters + start, (slots + start)...);
  }
}

template <bool decays, class Options, class... Float>
void update_all(Gradients gradients, std::size_t count, Options options, float* parameters,
                Float*... slots) {
  if (gradients.num > 1) {
    update_summed<decays>(gradients, count, options, parameters, slots...);
    return;
  }
  const Gradient only = gradients.first[0];
  with_codec(only.codec, [=](auto c) {
    update_encoded<decays, decltype(c)>(static_cast<const Byte*>(only.payload), only.factor, count,
                                        options, parameters, slots...);
  });
}

// A kernel of the table: `Float` is float, once for each of the rule's slots.
template <class Options, class... Float>
void update(float* parameters, Float*... slots, Gradients gradients, std::size_t count,
            Options options) {
  if (options.weight_decay == 0.0f) {
    update_all<false>(gradients, count, options, parameters, slots...);
  } else {
    update_all<true>(gradients, count, options, parameters, slots...);
  }
}

}  // namespace
}  // namespace pyps
