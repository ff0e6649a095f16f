// Payloads of some numbers come from the network: whatever they hold, nothing beyond them is read
// or written.

#include <cstdint>
#include <random>
#include <vector>

#include "check.h"
#include "kernel_sparse.h"
#include "values.h"

namespace {

using pyps::SparseCodec;

std::vector<unsigned char> encoded(SparseCodec codec, double setting, std::size_t count) {
  const std::vector<float> gradient = random_values(count, 1), residual = random_values(count, 2);
  std::vector<float> lost(count), decoded(count);
  // As _max_bytes of pyps_wire/codecs.py.
  const std::size_t chunks = (count + 4095) / 4096;
  Payload room(count + count * pyps::bits_of_value(codec) / 8 + 1 + chunks * 25, 0);
  const std::size_t size = pyps::sparse_codings.encode(
      room.data(), gradient.data(), residual.data(), 0.5f, lost.data(), codec, setting, count);
  std::vector<unsigned char> payload(room.data(), room.data() + size);
  payload.shrink_to_fit();
  CHECK(pyps::sparse_codings.decode(decoded.data(), payload.data(), size, codec, count));
  for (std::size_t i = 0; i < count; ++i) {
    CHECK(lost[i] == 0.5f * residual[i] + gradient[i] - decoded[i]);
  }
  return payload;
}

}  // namespace

void test_sparse() {
  std::mt19937 random(7);
  for (const SparseCodec codec :
       {SparseCodec::threshold, SparseCodec::topk, SparseCodec::topk2bit}) {
    for (const double setting : {1e-3, 0.1, 1.0}) {
      for (const std::size_t count : {1u, 300u, 4096u, 4097u, 9000u}) {
        const std::vector<unsigned char> payload = encoded(codec, setting, count);
        std::vector<float> decoded(count);
        for (std::size_t k = 0; k < 200; ++k) {
          std::vector<unsigned char> wrong = payload;
          if (k % 2 == 0) wrong.resize(1 + random() % payload.size());
          wrong.shrink_to_fit();
          for (int changes = 0; changes < 3; ++changes) {
            wrong[random() % wrong.size()] = static_cast<unsigned char>(random());
          }
          pyps::sparse_codings.decode(decoded.data(), wrong.data(), wrong.size(), codec, count);
        }
      }
    }
  }
}
