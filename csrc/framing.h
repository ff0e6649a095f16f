// Splits a protobuf message around the one large field that it carries, without building objects.
//
// The payload is left where it lies; everything else, concatenated, is again a valid encoding of
// the same message without its payload, small enough for any protobuf library to parse.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace pyps {

constexpr std::uint32_t field_number_max = (1u << 29) - 1;
constexpr int group_depth_max = 100;  // protobuf's own limit

// The bytes are no protobuf message. `what()` names the reason and the byte offset.
class FrameError : public std::invalid_argument {
 public:
  FrameError(const std::string& reason, std::size_t offset)
      : std::invalid_argument("malformed message at byte " + std::to_string(offset) + ": " +
                              reason),
        offset_(offset) {}

  // Where the part that could not be read begins.
  std::size_t offset() const { return offset_; }

 private:
  std::size_t offset_;
};

struct ByteRange {
  std::size_t offset;
  std::size_t size;
};

struct Frame {
  // The payload's bytes, without tag and length. A message without one has {size of the message,
  // 0}.
  ByteRange payload;
  // What is not payload, in order; neighbouring fields are one range.
  std::vector<ByteRange> header;
};

// Walks every valid encoding: any order of fields, unknown fields of any wire type, groups, lengths
// and values in more bytes than they need. Of several payload fields the last counts, as protobuf
// rules. The payload's field number with another wire type is an unknown field. Throws FrameError.
void split_frame(const unsigned char* data, std::size_t size, std::uint32_t field_number,
                 Frame* frame);

// A field that is a list or a message, and how often it came.
struct CountedField {
  std::uint32_t number;
  // Whether its bytes are fields again; else they are varints, one after the other.
  bool is_message;
  std::size_t count = 0;
  std::vector<CountedField> inner = {};
};

// Adds to the counts of `fields` and of those inside them; returns how many fields and varints
// there are in all. Throws FrameError.
std::size_t count_fields(const unsigned char* data, std::size_t size,
                         std::vector<CountedField>* fields);

// The most bytes that `write_payload_prefix` writes.
constexpr std::size_t payload_prefix_size_max = 5 + 10;

// Writes tag and length of a payload field of `payload_size` bytes; returns how many bytes that
// took.
std::size_t write_payload_prefix(std::uint32_t field_number, std::uint64_t payload_size,
                                 unsigned char* out);

// The number of a field that no message has: readers skip it.
constexpr std::uint32_t padding_field_number = 15;

// Fills what a header of `header_size` bytes does not use of its room, at `out`, with a field that
// readers skip; false where that cannot be: the header is longer, or one byte shorter.
bool pad_header(std::size_t header_size, std::size_t room, unsigned char* out);

}  // namespace pyps
