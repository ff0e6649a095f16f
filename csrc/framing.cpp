#include "framing.h"

#include <algorithm>
#include <cstring>

namespace pyps {
namespace {

enum WireType : std::uint32_t {
  varint = 0,
  fixed64 = 1,
  length_delimited = 2,
  group_start = 3,
  group_end = 4,
  fixed32 = 5,
};

constexpr std::size_t varint_size_max = 10;
constexpr std::size_t tag_size_max = 5;

struct Tag {
  std::uint32_t field_number;
  std::uint32_t wire_type;
};

// Reads forward through the message; every read either advances within it or throws.
class Reader {
 public:
  Reader(const unsigned char* data, std::size_t size) : data_(data), size_(size) {}

  std::size_t offset() const { return offset_; }
  bool at_end() const { return offset_ == size_; }

  Tag read_tag() {
    const std::size_t start = offset_;
    const std::uint64_t value = read_varint("tag", tag_size_max);
    if (value > UINT32_MAX) throw FrameError("tag does not fit 32 bits", start);
    const Tag tag = {static_cast<std::uint32_t>(value) >> 3,
                     static_cast<std::uint32_t>(value) & 7u};
    if (tag.field_number == 0) throw FrameError("field number 0", start);
    if (tag.wire_type > fixed32) {
      throw FrameError("wire type " + std::to_string(tag.wire_type), start);
    }
    return tag;
  }

  // Skips a length-delimited value and says where its bytes are.
  ByteRange read_bytes() {
    const std::size_t start = offset_;
    const std::uint64_t length = read_varint("length", varint_size_max);
    if (length > size_ - offset_) {
      throw FrameError("length " + std::to_string(length) + " where " +
                           std::to_string(size_ - offset_) + " bytes are left",
                       start);
    }
    const ByteRange bytes = {offset_, static_cast<std::size_t>(length)};
    offset_ += bytes.size;
    return bytes;
  }

  // Skips the value that follows `tag`, a group with all that it holds.
  void skip(Tag tag, std::size_t tag_offset) {
    switch (tag.wire_type) {
      case varint:
        read_varint("varint", varint_size_max);
        return;
      case fixed64:
        advance(8, "fixed64");
        return;
      case length_delimited:
        read_bytes();
        return;
      case group_start:
        skip_group(tag.field_number, tag_offset);
        return;
      case fixed32:
        advance(4, "fixed32");
        return;
      default:
        throw FrameError("end of a group that was not begun", tag_offset);
    }
  }

 private:
  // Keeps its own stack, so that a hostile message cannot use up the thread's.
  void skip_group(std::uint32_t field_number, std::size_t group_offset) {
    std::uint32_t open[group_depth_max];
    int depth = 0;
    open[depth++] = field_number;
    while (depth > 0) {
      if (at_end()) throw FrameError("group without an end", group_offset);
      const std::size_t tag_offset = offset_;
      const Tag tag = read_tag();
      if (tag.wire_type == group_start) {
        if (depth == group_depth_max) {
          throw FrameError("groups nested more than 100 deep", tag_offset);
        }
        open[depth++] = tag.field_number;
      } else if (tag.wire_type == group_end) {
        if (tag.field_number != open[--depth]) {
          throw FrameError("end of another group than the one begun last", tag_offset);
        }
      } else {
        skip(tag, tag_offset);
      }
    }
  }

  std::uint64_t read_varint(const char* what, std::size_t bytes_max) {
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < bytes_max; ++i) {
      if (offset_ + i == size_) throw FrameError(std::string("truncated ") + what, offset_);
      const std::uint64_t byte = data_[offset_ + i];
      value |= (byte & 0x7f) << (7 * i);
      if (byte < 0x80) {
        offset_ += i + 1;
        return value;
      }
    }
    throw FrameError(std::string(what) + " of more than " + std::to_string(bytes_max) + " bytes",
                     offset_);
  }

  void advance(std::size_t count, const char* what) {
    if (count > size_ - offset_) throw FrameError(std::string("truncated ") + what, offset_);
    offset_ += count;
  }

  const unsigned char* data_;
  std::size_t size_;
  std::size_t offset_ = 0;
};

void append(ByteRange range, std::vector<ByteRange>* ranges) {
  if (!ranges->empty() && ranges->back().offset + ranges->back().size == range.offset) {
    ranges->back().size += range.size;
  } else {
    ranges->push_back(range);
  }
}

std::size_t write_varint(std::uint64_t value, unsigned char* out) {
  std::size_t size = 0;
  while (value >= 0x80) {
    out[size++] = static_cast<unsigned char>(value | 0x80);
    value >>= 7;
  }
  out[size++] = static_cast<unsigned char>(value);
  return size;
}

}  // namespace

void split_frame(const unsigned char* data, std::size_t size, std::uint32_t field_number,
                 Frame* frame) {
  frame->payload = {size, 0};
  frame->header.clear();
  Reader reader(data, size);
  while (!reader.at_end()) {
    const std::size_t start = reader.offset();
    const Tag tag = reader.read_tag();
    if (tag.field_number == field_number && tag.wire_type == length_delimited) {
      frame->payload = reader.read_bytes();
    } else {
      reader.skip(tag, start);
      append({start, reader.offset() - start}, &frame->header);
    }
  }
}

std::size_t count_fields(const unsigned char* data, std::size_t size,
                         std::vector<CountedField>* fields) {
  std::size_t total = 0;
  Reader reader(data, size);
  while (!reader.at_end()) {
    const std::size_t start = reader.offset();
    const Tag tag = reader.read_tag();
    const auto field = std::find_if(fields->begin(), fields->end(), [&](const CountedField& each) {
      return each.number == tag.field_number;
    });
    ++total;
    if (field == fields->end() || tag.wire_type != length_delimited) {
      reader.skip(tag, start);
      if (field != fields->end()) ++field->count;
      continue;
    }
    const ByteRange bytes = reader.read_bytes();
    const unsigned char* const inside = data + bytes.offset;
    if (field->is_message) {
      ++field->count;
      total += count_fields(inside, bytes.size, &field->inner);
    } else {
      const auto is_last = [](unsigned char byte) { return byte < 0x80; };
      const auto varints =
          static_cast<std::size_t>(std::count_if(inside, inside + bytes.size, is_last));
      field->count += varints;
      total += varints;
    }
  }
  return total;
}

std::size_t write_payload_prefix(std::uint32_t field_number, std::uint64_t payload_size,
                                 unsigned char* out) {
  const std::size_t tag_size =
      write_varint(std::uint64_t{field_number} << 3 | length_delimited, out);
  return tag_size + write_varint(payload_size, out + tag_size);
}

bool pad_header(std::size_t header_size, std::size_t room, unsigned char* out) {
  // A tag of one byte, a length of one or, longer than it need be, of two.
  constexpr std::size_t padding_max = 3 + 0x3FFF;
  if (header_size == room) return true;
  if (header_size > room || room - header_size == 1 || room - header_size > padding_max) {
    return false;
  }
  const std::size_t gap = room - header_size;
  unsigned char* const padding = out + header_size;
  std::memset(padding, 0, gap);
  padding[0] = static_cast<unsigned char>(padding_field_number << 3 | length_delimited);
  if (gap > 2) {
    padding[1] = static_cast<unsigned char>(((gap - 3) & 0x7F) | 0x80);
    padding[2] = static_cast<unsigned char>((gap - 3) >> 7);
  }
  return true;
}

}  // namespace pyps
