// A codec of blocks is decoded inside the update loop: to the bits of its numbers sent as float32.

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "check.h"
#include "int8_blocks.h"
#include "kernels.h"
#include "values.h"

namespace pyps {
// The kernels with one codec more (CMakeLists.txt).
extern const Kernels kernels_blocks;
}  // namespace pyps

namespace {

constexpr Codec blocks = pyps::Int8Blocks::traits.codec;
constexpr float numbers[] = {0.1f, 1e-8f, 0.01f};

struct State {
  std::vector<float> p, s;
  float* arrays[2] = {p.data(), s.data()};
};

// A gradient as blocks, and the same numbers as float32.
struct Sent {
  Sent(std::size_t count, unsigned seed)
      : encoded(pyps::Int8Blocks::bytes_of(count), 3), decoded(random_values(count, seed)) {
    pyps::kernels_blocks.encode(encoded.data(), decoded.data(), blocks, count);
    pyps::kernels_blocks.decode(decoded.data(), encoded.data(), blocks, count);
  }
  Payload encoded;
  std::vector<float> decoded;
};

std::size_t adagrad(State& state, pyps::Gradients gradients, pyps::Reply reply) {
  const pyps::Kernels& kernels = pyps::kernels_blocks;
  for (std::size_t i = 0; i < kernels.num_rules; ++i) {
    if (std::string(kernels.rules[i].name) == "adagrad") {
      return kernels.rules[i].update(state.arrays, gradients, reply, state.p.size(), numbers);
    }
  }
  return 1;
}

void test_update(std::size_t count, bool sums, bool guarded) {
  Sent first(count, 5), second(count, 6);
  const pyps::Gradient as_blocks[] = {{first.encoded.data(), blocks, 0.5f},
                                      {second.encoded.data(), blocks, 0.3f}};
  const pyps::Gradient as_floats[] = {{first.decoded.data(), Codec::float32, 0.5f},
                                      {second.decoded.data(), Codec::float32, 0.3f}};
  const std::size_t num = sums ? 2 : 1;
  State mine{random_values(count, 7), std::vector<float>(count)};
  State expected{random_values(count, 7), std::vector<float>(count)};
  Payload reply(pyps::Int8Blocks::bytes_of(count), 5), same(pyps::Int8Blocks::bytes_of(count), 5);

  CHECK(adagrad(mine, {as_blocks, num, guarded}, {reply.data(), blocks}) == 0);
  CHECK(adagrad(expected, {as_floats, num, guarded}, {}) == 0);

  CHECK(same_bits(mine.p, expected.p) && same_bits(mine.s, expected.s));
  pyps::kernels_blocks.encode(same.data(), mine.p.data(), blocks, count);
  CHECK(std::memcmp(reply.data(), same.data(), pyps::Int8Blocks::bytes_of(count)) == 0);
}

void test_finite(std::size_t count) {
  const pyps::Kernels& kernels = pyps::kernels_blocks;
  std::vector<float> values = random_values(count, 8);
  Payload encoded(pyps::Int8Blocks::bytes_of(count), 1);
  kernels.encode(encoded.data(), values.data(), blocks, count);
  CHECK(kernels.first_non_finite(encoded.data(), blocks, count) == -1);
  if (count == 0) return;
  values[count - 1] = std::numeric_limits<float>::infinity();
  kernels.encode(encoded.data(), values.data(), blocks, count);
  const std::size_t start = (count - 1) / pyps::Int8Blocks::block * pyps::Int8Blocks::block;
  CHECK(kernels.first_non_finite(encoded.data(), blocks, count) ==
        static_cast<std::ptrdiff_t>(start));
  // What has become infinite since the scan is left out, a block_max at a time.
  const pyps::Gradient broken = {encoded.data(), blocks, 1.0f};
  State state{random_values(count, 7), std::vector<float>(count)};
  CHECK(adagrad(state, {&broken, 1, true}, {}) == (count - 1) % 512 + 1);
  for (const float value : state.p) CHECK(std::isfinite(value));
}

}  // namespace

void test_blocks() {
  constexpr std::size_t counts[] = {0, 1, 63, 64, 65, 512, 513, 4097, 300'000};
  for (const std::size_t count : counts) {
    for (const bool sums : {false, true}) {
      for (const bool guarded : {false, true}) test_update(count, sums, guarded);
    }
    test_finite(count);
  }
}
