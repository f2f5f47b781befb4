// Streams and events of CUDA for code outside the CUDA module, by way of its table.
#pragma once
#include <utility>

#include <tandem/tensor/cuda/module.h>

namespace tandem::cuda {

/// What a stream has been given up to a moment.
class Moment {
 public:
  Moment() = default;
  /// Of the calling thread's stream on the device.
  explicit Moment(Device device) : table_(&module("cuda")), event_(table_->new_event(device.index())) {}
  ~Moment() {
    if (event_ != nullptr) table_->release_time(event_);
  }
  Moment(Moment&& other) noexcept : table_(other.table_), event_(std::exchange(other.event_, nullptr)) {}
  Moment& operator=(Moment&& other) noexcept {
    std::swap(table_, other.table_);
    std::swap(event_, other.event_);
    return *this;
  }
  /// The calling thread's stream on the device goes on when all of it is done; the host does not wait.
  void hold_up(Device device) const {
    if (event_ != nullptr) table_->wait_event(device.index(), event_);
  }
  bool done() const { return event_ == nullptr || table_->event_done(event_); }

 private:
  const Module* table_ = nullptr;
  void* event_ = nullptr;
};

/// A stream of high priority.
class OwnStream {
 public:
  explicit OwnStream(Device device)
      : table_(module("cuda")), device_(device), stream_(table_.new_stream(device.index())) {}
  ~OwnStream() { table_.release_stream(device_.index(), stream_); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  Device device() const { return device_; }
  void* get() const { return stream_; }

 private:
  const Module& table_;
  const Device device_;
  void* const stream_;
};

/// The calling thread's work on the stream's device goes to that stream until this is destroyed.
class OnStream {
 public:
  explicit OnStream(const OwnStream& stream)
      : table_(module("cuda")), before_(table_.exchange_stream({stream.device().index(), stream.get()})) {}
  ~OnStream() { table_.exchange_stream(before_); }
  OnStream(const OnStream&) = delete;
  OnStream& operator=(const OnStream&) = delete;

 private:
  const Module& table_;
  const ThreadStream before_;
};

}  // namespace tandem::cuda
