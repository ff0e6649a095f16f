// Writing new parameters into the reply to a push.
//
// For kernels.cpp alone, which is compiled once per instruction set: everything is local to it.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "kernel_codecs.h"
#include "kernel_memory.h"

namespace pyps {
namespace {

// Elements that are summed, applied and written to the reply at a time: they fit the nearest cache,
// together with the same elements of the arrays.
constexpr std::size_t block_max = 1024;

// Replies of at least this size are stored past the caches, which have no room for them and the
// arrays: a store into a cache would first read the line from memory.
constexpr std::size_t stream_size_min = 256 * 1024;

// Writes a whole line of memory, past the caches where the processor can; `to` lies on a line.
inline void stream_line(Byte* to, const Byte* from) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#elif defined(__AVX2__)
  const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32));
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), first);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), second);
#elif defined(__SSE2__)
  for (std::size_t at = 0; at < cache_line_size; at += sizeof(__m128i)) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + at),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at)));
  }
#else
  __builtin_memcpy(to, from, cache_line_size);
#endif
}

// Makes the streamed bytes visible to other threads.
inline void end_streaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Writes a reply block by block. Only whole lines are streamed: an incomplete line at the end of a
// block is kept for the next.
class ReplyWriter {
 public:
  ReplyWriter(Reply reply, std::size_t count)
      : to_(static_cast<Byte*>(reply.encoded)),
        codec_(reply.codec),
        streams_(bytes_of(reply.codec, count) >= stream_size_min) {}

  // Writes the next parameters, at most a block, which follow the last ones in memory.
  void write(const float* parameters, std::size_t count) {
    if (to_ == nullptr) return;
    if (!streams_) {
      encode(to_, parameters, count);
      to_ += bytes_of(codec_, count);
    } else if (codec_ == Codec::float32) {
      stream(reinterpret_cast<const Byte*>(parameters) - waiting_, count * sizeof(float));
    } else {
      encode(words_ + waiting_, parameters, count);
      stream(words_, bytes_of(codec_, count));
      __builtin_memmove(words_, rest_, waiting_);
      rest_ = words_;
    }
  }

  void finish() {
    if (to_ == nullptr || !streams_) return;
    __builtin_memcpy(to_, rest_, waiting_);
    end_streaming();
  }

 private:
  void encode(Byte* to, const float* parameters, std::size_t count) const {
    with_codec(codec_, [=](auto c) { encode_all<decltype(c)>(to, parameters, count); });
  }

  // `from` begins with the kept bytes, and `added` bytes follow.
  void stream(const Byte* from, std::size_t added) {
    std::size_t size = waiting_ + added;
    const std::size_t to_line = -reinterpret_cast<std::uintptr_t>(to_) % cache_line_size;
    const std::size_t head = to_line < size ? to_line : size;
    __builtin_memcpy(to_, from, head);
    to_ += head;
    from += head;
    size -= head;
    for (; size >= cache_line_size; size -= cache_line_size) {
      stream_line(to_, from);
      to_ += cache_line_size;
      from += cache_line_size;
    }
    rest_ = from;
    waiting_ = size;
  }

  Byte* to_;
  Codec codec_;
  bool streams_;
  const Byte* rest_ = nullptr;
  std::size_t waiting_ = 0;
  alignas(cache_line_size) Byte words_[cache_line_size + block_max * sizeof(float)];
};

}  // namespace
}  // namespace pyps
