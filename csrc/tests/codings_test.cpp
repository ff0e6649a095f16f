// The library of workers, over arrays with nothing behind their last byte. Payloads of some numbers
// come from the network: whatever they hold, nothing beyond them is read or written.

#include <cstdint>
#include <random>
#include <vector>

#include "check.h"
#include "values.h"
#include "worker_codings.h"

extern "C" const pyps::WorkerCodings* pyps_codings(int isa);

namespace {

using pyps::SparseCodec;

// What an encoding loses may be written over what it was made of.
void test_blocks(const pyps::CodecKernels& kernels, Codec codec, std::size_t count) {
  const std::vector<float> gradient = random_values(count, 9);
  std::vector<float> residual = random_values(count, 10), lost(count), held = gradient;
  const std::size_t size = bytes_of(codec, count);
  Payload encoded(size, 7), same(size, 2);
  kernels.encode(encoded.data(), gradient.data(), codec, count);
  kernels.encode_feedback(same.data(), gradient.data(), residual.data(), 0.5f, lost.data(), codec,
                          count);
  kernels.encode_feedback(encoded.data(), gradient.data(), residual.data(), 0.5f, residual.data(),
                          codec, count);
  CHECK(same_bits(lost, residual));
  kernels.decode(lost.data(), encoded.data(), codec, count);
  kernels.add(lost.data(), encoded.data(), codec, count);
  kernels.encode_difference(encoded.data(), residual.data(), held.data(), codec, count);
}

std::vector<unsigned char> encoded(const pyps::SparseKernels& kernels, SparseCodec codec,
                                   double setting, std::size_t count) {
  const std::vector<float> gradient = random_values(count, 1), residual = random_values(count, 2);
  std::vector<float> lost(count), decoded(count);
  // As _max_bytes of pyps_wire/codecs.py.
  const std::size_t chunks = (count + 4095) / 4096;
  const std::size_t bits = codec == SparseCodec::topk ? 16 : codec == SparseCodec::topk2bit ? 2 : 1;
  Payload room(count + count * bits / 8 + 1 + chunks * 25, 0);
  const std::size_t size = kernels.encode(room.data(), gradient.data(), residual.data(), 0.5f,
                                          lost.data(), codec, setting, count);
  std::vector<unsigned char> payload(room.data(), room.data() + size);
  payload.shrink_to_fit();
  CHECK(kernels.decode(decoded.data(), payload.data(), size, codec, count));
  for (std::size_t i = 0; i < count; ++i) {
    CHECK(lost[i] == 0.5f * residual[i] + gradient[i] - decoded[i]);
  }
  return payload;
}

void test_sparse(const pyps::SparseKernels& kernels, SparseCodec codec, std::size_t count) {
  std::mt19937 random(7);
  for (const double setting : {1e-3, 0.1, 1.0}) {
    const std::vector<unsigned char> payload = encoded(kernels, codec, setting, count);
    std::vector<float> decoded(count);
    for (std::size_t k = 0; k < 200; ++k) {
      std::vector<unsigned char> wrong = payload;
      if (k % 2 == 0) wrong.resize(1 + random() % payload.size());
      wrong.shrink_to_fit();
      for (int changes = 0; changes < 3; ++changes) {
        wrong[random() % wrong.size()] = static_cast<unsigned char>(random());
      }
      kernels.decode(decoded.data(), wrong.data(), wrong.size(), codec, count);
    }
  }
}

}  // namespace

void test_codings() {
  for (int isa = 0; const pyps::WorkerCodings* table = pyps_codings(isa); ++isa) {
    for (const int* codec = table->block_codecs; *codec != 0; ++codec) {
      for (const std::size_t count : {0u, 1u, 31u, 32u, 33u, 1024u, 1025u, 4097u}) {
        test_blocks(table->blocks, static_cast<Codec>(*codec), count);
      }
    }
    for (const int* codec = table->sparse_codecs; *codec != 0; ++codec) {
      for (const std::size_t count : {1u, 300u, 4096u, 4097u, 9000u}) {
        test_sparse(table->sparse, static_cast<SparseCodec>(*codec), count);
      }
    }
  }
}
