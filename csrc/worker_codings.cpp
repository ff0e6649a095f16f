// The workers' part of the kernels: compiled once per instruction set, as kernels.cpp.
#include "worker_codings.h"

#include "kernel_codecs.h"
#include "kernel_sparse.h"

namespace pyps {
namespace {

// Encodes what `make(i)` returns of each number, then calls `take(i, number, decoded)`.
template <class C, class Make, class Take>
void encode_made(Byte* encoded, std::size_t count, Make make, Take take) {
  for_each_block<C>(encoded, count, [=](std::size_t start, Byte* to, auto size) {
    float made[C::block], decoded[C::block];
    for (std::size_t i = 0; i < size; ++i) made[i] = make(start + i);
    for (std::size_t i = size; i < C::block; ++i) made[i] = 0.0f;
    encode_block<C>(to, made, size);
    decode_block<C>(decoded, to, size);
    for (std::size_t i = 0; i < size; ++i) take(start + i, made[i], decoded[i]);
  });
}

template <class Loop>
void with_blocks(Codec codec, Loop loop) {
  with_codec(codec, [=](auto c) {
    if constexpr (is_words<decltype(c)>) __builtin_trap();
    if constexpr (!is_words<decltype(c)>) loop(c);
  });
}

constexpr CodecKernels codings = {
    .encode =
        [](void* encoded, const float* values, Codec codec, std::size_t count) {
          with_blocks(codec, [=](auto c) {
            encode_all<decltype(c)>(static_cast<Byte*>(encoded), values, count);
          });
        },
    .decode =
        [](float* values, const void* encoded, Codec codec, std::size_t count) {
          with_blocks(codec, [=](auto c) {
            decode_all<decltype(c)>(values, static_cast<const Byte*>(encoded), count);
          });
        },
    .add =
        [](float* values, const void* encoded, Codec codec, std::size_t count) {
          with_blocks(codec, [=](auto c) {
            using C = decltype(c);
            for_each_block<C>(static_cast<const Byte*>(encoded), count,
                              [=](std::size_t start, const Byte* from, auto size) {
                                float decoded[C::block];
                                decode_block<C>(decoded, from, size);
                                for (std::size_t i = 0; i < size; ++i) {
                                  values[start + i] += decoded[i];
                                }
                              });
          });
        },
    .encode_feedback =
        [](void* encoded, const float* gradient, const float* residual, float feedback, float* lost,
           Codec codec, std::size_t count) {
          with_blocks(codec, [=](auto c) {
            encode_made<decltype(c)>(
                static_cast<Byte*>(encoded), count,
                [=](std::size_t i) { return feedback * residual[i] + gradient[i]; },
                [=](std::size_t i, float made, float decoded) { lost[i] = made - decoded; });
          });
        },
    .encode_difference =
        [](void* encoded, const float* values, float* held, Codec codec, std::size_t count) {
          with_blocks(codec, [=](auto c) {
            encode_made<decltype(c)>(
                static_cast<Byte*>(encoded), count,
                [=](std::size_t i) { return values[i] - held[i]; },
                [=](std::size_t i, float, float decoded) { held[i] += decoded; });
          });
        },
};

struct BlockCodecs {
  constexpr BlockCodecs() {
    int* next = numbers;
    for (const CodecTraits& codec : Codecs::traits) {
      if (codec.format == 0) *next++ = static_cast<int>(codec.codec);
    }
  }
  int numbers[sizeof Codecs::traits / sizeof *Codecs::traits + 1] = {};
};
constexpr BlockCodecs block_codecs;
constexpr int sparse_codecs[] = {static_cast<int>(SparseCodec::threshold),
                                 static_cast<int>(SparseCodec::topk),
                                 static_cast<int>(SparseCodec::topk2bit), 0};

}  // namespace

extern const WorkerCodings PYPS_KERNELS;
const WorkerCodings PYPS_KERNELS = {codings, sparse_codings, block_codecs.numbers, sparse_codecs};

}  // namespace pyps
