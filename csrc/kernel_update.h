// The walk over memory that every rule shares: gradients are read, summed and applied in one pass.
//
// For kernels.cpp alone, which is compiled once per instruction set: everything is local to it.
#pragma once

#include <utility>

#include "kernel_codecs.h"
#include "kernel_finite.h"
#include "kernel_memory.h"
#include "kernel_reply.h"

namespace pyps {
namespace {

// Elements of an update between two prefetches: more than compilers unroll before they vectorise.
constexpr std::size_t update_piece = 2 * cache_line_size / sizeof(float);

// Every rule's loop, for one codec. Without decay the parameter does not enter the gradient at all:
// zero times infinity would be NaN.
template <bool decays, class C, class R, class... Float>
inline void update_loop(const Byte* __restrict gradient, float factor, std::size_t count, R rule,
                        float* __restrict parameters, Float* __restrict... slots) {
  for (std::size_t i = 0; i < count; ++i) {  // Vectorised.
    float g = factor * C::decode(load<C>(gradient, i));
    if constexpr (decays) g = decayed(rule, g, parameters[i]);
    rule.step(g, parameters[i], slots[i]...);
  }
}

// `ahead` is where that much of the gradient lies that is read some time later.
template <bool decays, class C, class R, class... Float>
inline void update_encoded(const Byte* gradient, const Byte* ahead, float factor, std::size_t count,
                           R rule, float* parameters, Float*... slots) {
  for_each_piece<update_piece>(count, [=](std::size_t start, std::size_t size) {
    constexpr std::size_t word_size = sizeof(typename C::Word);
    prefetch(parameters + start, update_distance, size * sizeof(float));
    (prefetch(slots + start, update_distance, size * sizeof(float)), ...);
    prefetch(ahead, start * word_size, size * word_size);
    update_loop<decays, C>(gradient + start * word_size, factor, size, rule, parameters + start,
                           (slots + start)...);
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
    const float factor = gradient.factor;
    const Byte* encoded = static_cast<const Byte*>(gradient.payload) + C::bytes_of(start);
    if constexpr (is_words<C>) {
      constexpr std::size_t word_size = sizeof(typename C::Word);
      for_each_piece<update_piece>(count, [=](std::size_t at, std::size_t size) {
        prefetch(encoded + at * word_size, update_distance, size * word_size);
        sum_loop<adds, C>(sum + at, encoded + at * word_size, factor, size);
      });
    } else {
      float values[block_max];
      decode_all<C>(values, encoded, count);
      sum_loop<adds, Float32>(sum, reinterpret_cast<const Byte*>(values), factor, count);
    }
  });
}

// A block of a gradient that others may write to, as it was at one moment.
struct PrivateBlock {
  alignas(cache_line_size) Byte words[block_max * sizeof(float)];

  // Returns whether all numbers are finite.
  bool copy(const Gradient& gradient, std::size_t start, std::size_t count) {
    return with_codec(gradient.codec, [&](auto c) {
      using C = decltype(c);
      const Byte* theirs = static_cast<const Byte*>(gradient.payload) + C::bytes_of(start);
      __builtin_memcpy(words, theirs, C::bytes_of(count));
      // From here on the copy is read: the compiler may not go back to the memory behind it.
      asm volatile("" : : "r"(words) : "memory");
      if constexpr (is_words<C>) return !is_carry<C>(exponent_carries<C>(words, count));
      return first_non_finite_in<C>(words, count) < 0;
    });
  }
};

// What one block of an update applies, and the room to make it in.
class BlockSource {
 public:
  BlockSource(Gradients gradients) : gradients_(gradients) {}

  std::size_t left_out() const { return left_out_; }

  // Calls `update(codec, words, ahead, factor)` with the weighted sum of the block's gradients,
  // unless all of them were left out; `ahead` is that of update_encoded.
  template <class Update>
  void with_block(std::size_t start, std::size_t count, Update update) {
    float factor = 1.0f;
    if (gradients_.num > 1) {
      if (!sum(start, count)) return;
    } else {
      const Gradient& only = gradients_.first[0];
      const bool guarded = gradients_.guarded;
      if (guarded && !copy_.copy(only, start, count)) {
        left_out_ += count;
        return;
      }
      factor = only.factor;
      const bool updated = with_codec(only.codec, [&](auto c) {
        using C = decltype(c);
        const Byte* theirs = static_cast<const Byte*>(only.payload) + C::bytes_of(start);
        const Byte* encoded = guarded ? copy_.words : theirs;
        if constexpr (is_words<C>) {
          update(c, encoded, theirs + (guarded ? guarded_distance : update_distance), factor);
        } else {
          static_assert(block_max % C::block == 0 && C::bytes_of(block_max) <= sizeof copy_.words);
          decode_all<C>(sum_, encoded, count);
        }
        return is_words<C>;
      });
      if (updated) return;
    }
    const Byte* words = reinterpret_cast<const Byte*>(sum_);
    update(Float32{}, words, words, factor);
  }

 private:
  // Returns whether any gradient was added.
  bool sum(std::size_t start, std::size_t count) {
    bool any = false;
    for (std::size_t i = 0; i < gradients_.num; ++i) {
      Gradient gradient = gradients_.first[i];
      std::size_t at = start;
      if (gradients_.guarded) {
        if (!copy_.copy(gradient, start, count)) {
          left_out_ += count;
          continue;
        }
        gradient.payload = copy_.words;
        at = 0;
      }
      if (any) {
        sum_encoded<true>(sum_, gradient, at, count);
      } else {
        sum_encoded<false>(sum_, gradient, at, count);
      }
      any = true;
    }
    return any;
  }

  Gradients gradients_;
  std::size_t left_out_ = 0;
  PrivateBlock copy_;
  alignas(cache_line_size) float sum_[block_max];
};

template <bool decays, class R, class... Float>
std::size_t update_blocks(Gradients gradients, Reply reply, std::size_t count, R rule,
                          float* parameters, Float*... slots) {
  BlockSource source(gradients);
  ReplyWriter writer(reply, count);
  for (std::size_t start = 0; start < count; start += block_max) {
    const std::size_t left = count - start;
    const std::size_t size = left < block_max ? left : block_max;
    source.with_block(start, size, [=](auto c, const Byte* words, const Byte* ahead, float factor) {
      update_encoded<decays, decltype(c)>(words, ahead, factor, size, rule, parameters + start,
                                          (slots + start)...);
    });
    writer.write(parameters + start, size);
  }
  writer.finish();
  return source.left_out();
}

// The update of a table's entry.
template <class R, std::size_t num_arrays>
std::size_t update(float* const* arrays, Gradients gradients, Reply reply, std::size_t count,
                   const float* numbers) {
  R rule;
  __builtin_memcpy(&rule, numbers, sizeof rule);
  return [=]<std::size_t... i>(std::index_sequence<i...>) {
    return rule.weight_decay == 0.0f
               ? update_blocks<false>(gradients, reply, count, rule, arrays[i]...)
               : update_blocks<true>(gradients, reply, count, rule, arrays[i]...);
  }(std::make_index_sequence<num_arrays>());
}

}  // namespace
}  // namespace pyps
