#include "framing.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"

namespace {

constexpr std::uint32_t payload_number = 15;

// Splits a copy that is a heap block of its exact size. Whatever the bytes are, the outcome is an
// error inside the message or ranges inside it.
bool splits(const std::string& message) {
  pyps::Frame frame;
  std::unique_ptr<unsigned char[]> block(new unsigned char[message.size()]);
  if (!message.empty()) std::memcpy(block.get(), message.data(), message.size());
  try {
    pyps::split_frame(block.get(), message.size(), payload_number, &frame);
  } catch (const pyps::FrameError& error) {
    CHECK(error.offset() <= message.size());
    return false;
  }
  std::vector<pyps::CountedField> fields = {{1, false}, {payload_number, true, 0, {{1, false}}}};
  try {
    // Each takes a byte at least.
    CHECK(pyps::count_fields(block.get(), message.size(), &fields) <= message.size());
  } catch (const pyps::FrameError&) {
    // A payload need not be a message.
  }
  CHECK(frame.payload.offset <= message.size());
  CHECK(frame.payload.size <= message.size() - frame.payload.offset);
  std::size_t end = 0;
  for (const pyps::ByteRange& range : frame.header) {
    CHECK(range.offset >= end && range.size > 0);
    end = range.offset + range.size;
    CHECK(end <= message.size());
  }
  return true;
}

std::string varint(std::uint64_t value) {
  std::string encoded;
  for (; value >= 0x80; value >>= 7) encoded += static_cast<char>(value | 0x80);
  return encoded + static_cast<char>(value);
}

std::string tag(std::uint64_t number, unsigned wire_type) {
  return varint(number << 3 | wire_type);
}

std::string repeated(const std::string& text, int times) {
  std::string result;
  for (int i = 0; i < times; ++i) result += text;
  return result;
}

std::string random_field(std::mt19937* random, int depth) {
  const auto below = [random](unsigned bound) {
    return static_cast<unsigned>((*random)() % bound);
  };
  const unsigned number = 1 + below(20);
  const std::string bytes(below(40), static_cast<char>(below(256)));
  switch (below(depth < 6 ? 6 : 5)) {
    case 0:
      return tag(number, 0) + varint((std::uint64_t{(*random)()} << 32) >> below(64));
    case 1:
      return tag(number, 1) + std::string(8, 'x');
    case 2:
      return tag(number, 2) + varint(bytes.size()) + bytes;
    case 3:
      return tag(payload_number, 2) + varint(bytes.size()) + bytes;
    case 4:
      return tag(number, 5) + std::string(4, 'x');
    default: {
      std::string inside;
      for (unsigned i = below(4); i > 0; --i) inside += random_field(random, depth + 1);
      return tag(number, 3) + inside + tag(number, 4);
    }
  }
}

void test_hostile_messages() {
  const std::string open = tag(1, 3);
  const std::string close = tag(1, 4);
  CHECK(splits(repeated(open, 100) + repeated(close, 100)));
  CHECK(!splits(repeated(open, 101) + repeated(close, 101)));
  CHECK(!splits(repeated(open, 1000000)));
  CHECK(!splits(repeated(close, 3)));
  CHECK(!splits(open + tag(2, 4)));
  CHECK(!splits(std::string(64, '\xff')));
  CHECK(!splits(std::string(64, '\x80')));
  CHECK(!splits(std::string(64, '\0')));
  for (int bit = 2; bit < 64; ++bit) {  // Lengths beyond the three bytes that there are.
    const std::uint64_t length = std::uint64_t{1} << bit;
    CHECK(!splits(tag(payload_number, 2) + varint(length) + "abc"));
    CHECK(!splits(tag(3, 2) + varint(~std::uint64_t{0} - length) + "abc"));
  }
  // As many ranges as the message can hold.
  CHECK(splits(repeated(tag(payload_number, 2) + varint(0) + tag(1, 0) + varint(0), 100000)));
}

void test_random_messages() {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    std::string message;
    for (unsigned i = 0; i < 8; ++i) message += random_field(&random, 0);
    CHECK(splits(message));
    for (std::size_t length = 0; length < message.size(); ++length)
      splits(message.substr(0, length));
    for (int change = 0; change < 200; ++change) {
      std::string broken = message;
      broken[random() % broken.size()] = static_cast<char>(random());
      splits(broken);
    }
  }
  for (int round = 0; round < 100000; ++round) {
    std::string blob(random() % 40, '\0');
    for (char& byte : blob) byte = static_cast<char>(random());
    splits(blob);
  }
}

}  // namespace

void test_framing() {
  test_hostile_messages();
  test_random_messages();
}
