// A codec of blocks is decoded inside the update loop: to the bits of its numbers sent as float32.

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "check.h"
#include "isa.h"
#include "kernels.h"
#include "values.h"

namespace {

constexpr float numbers[] = {0.1f, 1e-8f, 0.01f};

std::size_t block_of(Codec codec) { return codec == Codec::onebit ? 1024 : 32; }

struct State {
  std::vector<float> p, s;
  float* arrays[2] = {p.data(), s.data()};
};

// A gradient as blocks, and the same numbers as float32.
struct Sent {
  Sent(Codec codec, std::size_t count, unsigned seed)
      : encoded(bytes_of(codec, count), 3), decoded(random_values(count, seed)) {
    pyps::kernels().encode(encoded.data(), decoded.data(), codec, count);
    pyps::kernels().decode(decoded.data(), encoded.data(), codec, count);
  }
  Payload encoded;
  std::vector<float> decoded;
};

std::size_t adagrad(State& state, pyps::Gradients gradients, pyps::Reply reply) {
  const pyps::Kernels& kernels = pyps::kernels();
  for (std::size_t i = 0; i < kernels.num_rules; ++i) {
    if (std::string(kernels.rules[i].name) == "adagrad") {
      return kernels.rules[i].update(state.arrays, gradients, reply, state.p.size(), numbers);
    }
  }
  return 1;
}

void test_update(Codec codec, std::size_t count, bool sums, bool guarded) {
  Sent first(codec, count, 5), second(codec, count, 6);
  const pyps::Gradient as_blocks[] = {{first.encoded.data(), codec, 0.5f},
                                      {second.encoded.data(), codec, 0.3f}};
  const pyps::Gradient as_floats[] = {{first.decoded.data(), Codec::float32, 0.5f},
                                      {second.decoded.data(), Codec::float32, 0.3f}};
  const std::size_t num = sums ? 2 : 1;
  State mine{random_values(count, 7), std::vector<float>(count)};
  State expected{random_values(count, 7), std::vector<float>(count)};
  const std::size_t size = bytes_of(codec, count);
  Payload reply(size, 5), same(size, 5);

  CHECK(adagrad(mine, {as_blocks, num, guarded}, {reply.data(), codec}) == 0);
  CHECK(adagrad(expected, {as_floats, num, guarded}, {}) == 0);

  CHECK(same_bits(mine.p, expected.p) && same_bits(mine.s, expected.s));
  pyps::kernels().codings.encode(same.data(), mine.p.data(), codec, count);
  CHECK(std::memcmp(reply.data(), same.data(), size) == 0);
}

void test_finite(Codec codec, std::size_t count) {
  const pyps::Kernels& kernels = pyps::kernels();
  std::vector<float> values = random_values(count, 8);
  Payload encoded(bytes_of(codec, count), 1);
  // Large, and infinite.
  values[count - 1] = 1e38f;
  kernels.encode(encoded.data(), values.data(), codec, count);
  CHECK(kernels.first_non_finite(encoded.data(), codec, count) == -1);
  values[count - 1] = std::numeric_limits<float>::infinity();
  kernels.encode(encoded.data(), values.data(), codec, count);
  const auto found = kernels.first_non_finite(encoded.data(), codec, count);
  CHECK(found >= 0 &&
        static_cast<std::size_t>(found) / block_of(codec) == (count - 1) / block_of(codec));
  // What has become infinite since the scan is left out, a block_max at a time.
  const pyps::Gradient broken = {encoded.data(), codec, 1.0f};
  State state{random_values(count, 7), std::vector<float>(count)};
  CHECK(adagrad(state, {&broken, 1, true}, {}) == (count - 1) % 1024 + 1);
  for (const float value : state.p) CHECK(std::isfinite(value));
}

// What an encoding loses may be written over what it was made of.
void test_feedback(Codec codec, std::size_t count) {
  const pyps::CodecKernels& kernels = pyps::kernels().codings;
  const std::vector<float> gradient = random_values(count, 9), residual = random_values(count, 10);
  std::vector<float> sum(count), decoded(count), lost = residual;
  for (std::size_t i = 0; i < count; ++i) sum[i] = 0.5f * residual[i] + gradient[i];
  Payload encoded(bytes_of(codec, count), 7), same(bytes_of(codec, count), 2);
  kernels.encode_feedback(encoded.data(), gradient.data(), lost.data(), 0.5f, lost.data(), codec,
                          count);
  kernels.encode(same.data(), sum.data(), codec, count);
  CHECK(std::memcmp(encoded.data(), same.data(), bytes_of(codec, count)) == 0);
  kernels.decode(decoded.data(), same.data(), codec, count);
  for (std::size_t i = 0; i < count; ++i) CHECK(lost[i] == sum[i] - decoded[i]);

  std::vector<float> held(count), added(count);
  kernels.encode_difference(encoded.data(), sum.data(), held.data(), codec, count);
  kernels.add(added.data(), encoded.data(), codec, count);
  CHECK(same_bits(held, added));
}

}  // namespace

void test_blocks() {
  constexpr std::size_t counts[] = {0, 1, 31, 32, 33, 512, 1024, 1025, 4097, 300'000};
  for (const std::string& isa : pyps::available_isas()) {
    pyps::select_isa(isa);
    for (const Codec codec : {Codec::int8, Codec::int4, Codec::onebit}) {
      for (const std::size_t count : counts) {
        for (const bool sums : {false, true}) {
          for (const bool guarded : {false, true}) test_update(codec, count, sums, guarded);
        }
        if (count > 0) test_finite(codec, count);
        test_feedback(codec, count);
      }
    }
  }
}
