// The library of workers, which servers use too: payloads of the network, and what it encodes
// itself of any numbers. An input is codec, setting and count, then the payload, or the numbers.
#include "input.h"
#include "isa.h"
#include "kernels.h"
#include "worker_codings.h"

extern "C" const pyps::WorkerCodings* pyps_codings(int isa);

namespace {

constexpr std::size_t count_max = 9000;

std::size_t room_of(pyps::SparseCodec codec, std::size_t count) {
  // As _max_bytes of pyps_wire/codecs.py.
  const bool topk = codec == pyps::SparseCodec::topk;
  const std::size_t levels = topk ? 0 : codec == pyps::SparseCodec::threshold ? 1 : 2;
  const std::size_t bits = topk ? 16 : levels;
  return count + (count * bits + 7) / 8 + (count + 4095) / 4096 * (2 + 2 * levels + 17);
}

void decode_sparse(pyps::SparseCodec codec, std::size_t count,
                   const std::vector<std::uint8_t>& payload) {
  std::vector<float> first(count);
  const bool valid =
      pyps_codings(0)->sparse.decode(first.data(), payload.data(), payload.size(), codec, count);
  for (int isa = 1; const pyps::WorkerCodings* table = pyps_codings(isa); ++isa) {
    std::vector<float> values(count);
    REQUIRE(valid ==
            table->sparse.decode(values.data(), payload.data(), payload.size(), codec, count));
    REQUIRE(!valid || same(first, values));
  }
}

void encode_sparse(pyps::SparseCodec codec, double setting, const std::vector<float>& gradient,
                   const std::vector<float>& residual) {
  const std::size_t count = gradient.size();
  std::vector<std::uint8_t> first;
  for (int isa = 0; const pyps::WorkerCodings* table = pyps_codings(isa); ++isa) {
    std::vector<std::uint8_t> room(room_of(codec, count));
    std::vector<float> lost(count), decoded(count);
    room.resize(table->sparse.encode(room.data(), gradient.data(), residual.data(), 1.0f,
                                     lost.data(), codec, setting, count));
    REQUIRE(table->sparse.decode(decoded.data(), room.data(), room.size(), codec, count));
    if (isa == 0) first = room;
    REQUIRE(room == first);
  }
}

void decode_blocks(pyps::Codec codec, std::size_t count, const std::vector<std::uint8_t>& payload) {
  std::vector<float> first;
  for (int isa = 0; const pyps::WorkerCodings* table = pyps_codings(isa); ++isa) {
    std::vector<float> values(count);
    table->blocks.decode(values.data(), payload.data(), codec, count);
    table->blocks.add(values.data(), payload.data(), codec, count);
    if (isa == 0) first = values;
    REQUIRE(same(first, values));
  }
}

void encode_blocks(pyps::Codec codec, std::size_t size, const std::vector<float>& gradient,
                   const std::vector<float>& residual) {
  const std::size_t count = gradient.size();
  std::vector<std::uint8_t> first;
  for (int isa = 0; const pyps::WorkerCodings* table = pyps_codings(isa); ++isa) {
    std::vector<std::uint8_t> encoded(size);
    std::vector<float> lost(count), held = residual;
    table->blocks.encode_feedback(encoded.data(), gradient.data(), residual.data(), 0.5f,
                                  lost.data(), codec, count);
    table->blocks.encode_difference(encoded.data(), gradient.data(), held.data(), codec, count);
    if (isa == 0) first = encoded;
    REQUIRE(encoded == first);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  const std::size_t choice = input.below(6);
  const bool encodes = input.below(2) == 1;
  const double setting = static_cast<double>(1 + input.below(1000)) / 1000;
  const std::size_t count = input.below(count_max);
  if (choice < 3) {
    const auto codec = static_cast<pyps::SparseCodec>(static_cast<std::size_t>(7) + choice);
    if (!encodes)
      decode_sparse(codec, count, input.rest());
    else
      encode_sparse(codec, setting, input.floats(count), input.floats(count));
  } else {
    const auto codec = static_cast<pyps::Codec>(choice + 1);
    const std::size_t bytes = pyps::all_codecs()[choice].bytes_of(count);
    if (!encodes)
      decode_blocks(codec, count, input.bytes(bytes));
    else
      encode_blocks(codec, bytes, input.floats(count), input.floats(count));
  }
  return 0;
}
