// How the kernels read and write some numbers of each chunk of 4,096; pyps_wire/codecs.py says how.
//
// For worker_codings.cpp alone, which is compiled once per instruction set.
#pragma once

#include "kernel_codecs.h"
#include "worker_codings.h"

namespace pyps {
namespace {

constexpr std::size_t chunk_max = 4096;
constexpr std::size_t pass_over = 255;

// The bfloat16 before a chunk's entries, and the bits of a value.
constexpr std::size_t num_levels(SparseCodec codec) {
  return codec == SparseCodec::threshold ? 1 : codec == SparseCodec::topk2bit ? 2 : 0;
}
constexpr std::size_t bits_of_value(SparseCodec codec) {
  return codec == SparseCodec::threshold ? 1 : codec == SparseCodec::topk2bit ? 2 : 16;
}

inline std::uint16_t level_of(double number) {
  const auto value = static_cast<float>(number);
  // Processors differ in the sign of NaN.
  return value == value ? Bfloat16::encode(value) : std::uint16_t{0x7fc0};
}

inline std::uint16_t read_16(const Byte* from) { return load<Bfloat16>(from, 0); }

inline void write_16(Byte* to, std::size_t number) {
  store<Bfloat16>(to, 0, static_cast<std::uint16_t>(number));
}

// A chunk as it is encoded: its numbers, and the places of those that are sent.
struct Chunk {
  float numbers[chunk_max];
  std::int32_t magnitudes[chunk_max];
  std::size_t size;
  std::uint16_t places[chunk_max];
  std::size_t num = 0;

  void look() {
    for (std::size_t i = 0; i < size; ++i) {
      magnitudes[i] = static_cast<std::int32_t>(bits_of(numbers[i]) & 0x7fffffffu);
    }
    for (std::size_t i = size; i < chunk_max; ++i) {
      magnitudes[i] = 0;
    }
  }

  // Numbers of at least this magnitude; magnitudes of 0 behind the last may count.
  std::size_t count_from(std::int32_t least) const {
    std::int32_t count = 0;
    for (std::size_t i = 0; i < chunk_max; ++i) {
      count += magnitudes[i] >= least;
    }
    return static_cast<std::size_t>(count);
  }

  // Takes the `wanted` largest, of equal ones the first: the least bits of one are found bit by
  // bit.
  void take_largest(std::size_t wanted) {
    std::int32_t least = 0;
    std::size_t count = chunk_max;
    for (std::int32_t bit = 1 << 30; bit > 0 && count != wanted; bit >>= 1) {
      const std::size_t found = count_from(least | bit);
      if (found < wanted) continue;
      least |= bit;
      count = found;
    }
    std::size_t equal = wanted;
    // Nothing is above the NaN of all ones.
    if (count != wanted && least != INT32_MAX) equal -= count_from(least + 1);
    constexpr std::size_t piece = 32;
    for (std::size_t start = 0; start < size; start += piece) {
      // Few pieces have any, and to see that is faster than to look at each number.
      std::int32_t any = 0;
      for (std::size_t i = start; i < start + piece; ++i) any |= magnitudes[i] >= least;
      const std::size_t stop = any == 0 ? start : start + piece < size ? start + piece : size;
      for (std::size_t i = start; i < stop; ++i) {
        if (magnitudes[i] < least) continue;
        if (count != wanted && magnitudes[i] == least) {
          if (equal == 0) continue;
          --equal;
        }
        places[num++] = static_cast<std::uint16_t>(i);
      }
    }
  }

  // Sums are those of onebit. A level that is NaN takes all: servers have to see it.
  float take_from(double tau) {
    float lanes[32] = {};
    for (std::size_t start = 0; start < chunk_max; start += 32) {
      for (std::size_t lane = 0; lane < 32; ++lane) {
        lanes[lane] += float_of(static_cast<std::uint32_t>(magnitudes[start + lane]));
      }
    }
    double sum = 0;
    for (const float lane : lanes) sum += double{lane};
    const float level = Bfloat16::decode(level_of(tau * (sum / static_cast<double>(size))));
    for (std::size_t i = 0; level != 0.0f && i < size; ++i) {
      if (!(__builtin_fabsf(numbers[i]) < level)) places[num++] = static_cast<std::uint16_t>(i);
    }
    return level;
  }

  // The means of the kept magnitudes up to their mean, and above.
  double split(double* levels) const {
    double sum = 0, sums[2] = {};
    std::size_t counts[2] = {};
    for (std::size_t i = 0; i < num; ++i) sum += magnitude(i);
    const double mean = sum / static_cast<double>(num);
    for (std::size_t i = 0; i < num; ++i) {
      const bool upper = magnitude(i) > mean;
      sums[upper] += magnitude(i);
      ++counts[upper];
    }
    for (std::size_t side = 0; side < 2; ++side) {
      levels[side] = counts[side] > 0 ? sums[side] / static_cast<double>(counts[side]) : 0.0;
    }
    return mean;
  }

  double magnitude(std::size_t i) const { return double{__builtin_fabsf(numbers[places[i]])}; }

  // Writes the entries; returns where they end.
  Byte* write_places(Byte* to) const {
    std::size_t next = 0;
    for (std::size_t i = 0; i < num; ++i) {
      std::size_t gap = places[i] - next;
      for (; gap >= pass_over; gap -= pass_over) *to++ = pass_over;
      *to++ = static_cast<Byte>(gap);
      next = std::size_t{places[i]} + 1;
    }
    return to;
  }

  // Writes the chunk, and what each sent number decodes to; returns its end.
  Byte* write(Byte* to, SparseCodec codec, double setting, float* decoded) {
    look();
    double levels[2] = {}, mean = 0;
    if (codec == SparseCodec::threshold) {
      levels[0] = double{take_from(setting)};
    } else {
      const auto share =
          static_cast<std::size_t>(__builtin_nearbyint(static_cast<double>(size) * setting));
      take_largest(share > 0 ? share : 1);
    }
    if (codec == SparseCodec::topk2bit) mean = split(levels);
    Byte* const entries = to + 2 + 2 * num_levels(codec);
    float read[2];
    for (std::size_t k = 0; k < num_levels(codec); ++k) {
      write_16(to + 2 + 2 * k, level_of(levels[k]));
      read[k] = Bfloat16::decode(level_of(levels[k]));
    }
    Byte* values = write_places(entries);
    write_16(to, static_cast<std::size_t>(values - entries));
    const std::size_t bits = bits_of_value(codec);
    const std::size_t num_bytes = (num * bits + 7) / 8;
    if (codec != SparseCodec::topk) {
      for (std::size_t i = 0; i < num_bytes; ++i) values[i] = 0;
    }
    for (std::size_t i = 0; i < num; ++i) {
      const float number = numbers[places[i]];
      if (codec == SparseCodec::topk) {
        const std::uint16_t word = Bfloat16::encode(number);
        store<Bfloat16>(values, i, word);
        decoded[i] = Bfloat16::decode(word);
        continue;
      }
      const std::uint32_t negative = bits_of(number) >> 31;
      const bool upper = codec == SparseCodec::topk2bit && magnitude(i) > mean;
      const std::uint32_t code = bits == 1 ? negative : negative << 1 | std::uint32_t{upper};
      values[i * bits / 8] = static_cast<Byte>(values[i * bits / 8] | code << i * bits % 8);
      decoded[i] = negative != 0 ? -read[upper] : read[upper];
    }
    return values + num_bytes;
  }
};

// Writes one chunk's numbers over zeros; returns what follows it, null where it is malformed.
inline const Byte* decode_chunk(float* values, std::size_t size, const Byte* from, const Byte* end,
                                SparseCodec codec) {
  const std::size_t head = 2 + 2 * num_levels(codec);
  if (static_cast<std::size_t>(end - from) < head) return nullptr;
  const std::size_t num_entries = read_16(from);
  float levels[2] = {};
  for (std::size_t k = 0; k < num_levels(codec); ++k) {
    levels[k] = Bfloat16::decode(read_16(from + 2 + 2 * k));
  }
  from += head;
  if (static_cast<std::size_t>(end - from) < num_entries) return nullptr;
  // Places differ, so that they are no more than the numbers.
  std::uint16_t places[chunk_max];
  std::size_t num = 0, next = 0;
  for (std::size_t i = 0; i < num_entries; ++i) {
    next += from[i];
    if (from[i] == pass_over) continue;
    if (next >= size) return nullptr;
    places[num++] = static_cast<std::uint16_t>(next++);
  }
  from += num_entries;
  const std::size_t bits = bits_of_value(codec);
  const std::size_t num_bytes = (num * bits + 7) / 8;
  if (static_cast<std::size_t>(end - from) < num_bytes) return nullptr;
  for (std::size_t i = 0; i < num; ++i) {
    if (codec == SparseCodec::topk) {
      values[places[i]] = Bfloat16::decode(load<Bfloat16>(from, i));
      continue;
    }
    const std::uint32_t code = std::uint32_t{from[i * bits / 8]} >> i * bits % 8;
    const float level = levels[bits == 2 ? code & 1u : 0];
    values[places[i]] = (code >> (bits - 1) & 1u) != 0 ? -level : level;
  }
  return from + num_bytes;
}

constexpr SparseKernels sparse_codings = {
    .encode = [](void* encoded, const float* gradient, const float* residual, float feedback,
                 float* lost, SparseCodec codec, double setting, std::size_t count) -> std::size_t {
      Byte* to = static_cast<Byte*>(encoded);
      for (std::size_t start = 0; start < count; start += chunk_max) {
        Chunk chunk;
        chunk.size = count - start < chunk_max ? count - start : chunk_max;
        for (std::size_t i = 0; i < chunk.size; ++i) {
          const float g = gradient[start + i];
          chunk.numbers[i] = residual == nullptr ? g : feedback * residual[start + i] + g;
        }
        float decoded[chunk_max];
        to = chunk.write(to, codec, setting, decoded);
        if (lost == nullptr) continue;
        __builtin_memcpy(lost + start, chunk.numbers, chunk.size * sizeof(float));
        for (std::size_t i = 0; i < chunk.num; ++i) lost[start + chunk.places[i]] -= decoded[i];
      }
      return static_cast<std::size_t>(to - static_cast<Byte*>(encoded));
    },
    .decode = [](float* values, const void* encoded, std::size_t num_bytes, SparseCodec codec,
                 std::size_t count) -> bool {
      const Byte* from = static_cast<const Byte*>(encoded);
      const Byte* const end = from + num_bytes;
      __builtin_memset(values, 0, count * sizeof(float));
      for (std::size_t start = 0; start < count && from != nullptr; start += chunk_max) {
        const std::size_t left = count - start;
        from = decode_chunk(values + start, left < chunk_max ? left : chunk_max, from, end, codec);
      }
      return from == end;
    },
};

}  // namespace
}  // namespace pyps
