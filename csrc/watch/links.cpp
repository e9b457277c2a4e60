#include "watch/links.h"

#include <arpa/inet.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <optional>
#include <utility>

namespace fastddp {
namespace {

// A packet sent so often in a row without an answer is not lost by chance. It takes about 1.5 s.
constexpr int kUnanswered = 3;
constexpr double kCount = 1.0;  // seconds
// A slow network brings answers late, but brings some.
constexpr uint32_t kSilent = 1200;  // ms
constexpr int kMostProbes = 127;    // the kernel's own limit

struct Connection {
  uint64_t socket = 0;  // its number in the kernel; descriptors' numbers are reused
  std::string peer;
  bool is_unanswered = false;
  uint64_t bytes = 0;
};

uint64_t socket_of(int descriptor) {
  struct stat of{};
  return fstat(descriptor, &of) == 0 && S_ISSOCK(of.st_mode) ? of.st_ino : 0;
}

// None: the peer is on this machine, where no network is in between.
std::optional<std::string> far_address(int descriptor) {
  sockaddr_storage peer{};
  socklen_t size = sizeof(peer);
  if (getpeername(descriptor, reinterpret_cast<sockaddr*>(&peer), &size) != 0) return std::nullopt;
  std::array<char, INET6_ADDRSTRLEN> text{};
  const void* address = nullptr;
  if (peer.ss_family == AF_INET) address = &reinterpret_cast<const sockaddr_in*>(&peer)->sin_addr;
  if (peer.ss_family == AF_INET6) address = &reinterpret_cast<const sockaddr_in6*>(&peer)->sin6_addr;
  if (address == nullptr || inet_ntop(peer.ss_family, address, text.data(), text.size()) == nullptr) return std::nullopt;
  std::string found = text.data();
  if (found.starts_with("::ffff:")) found.erase(0, 7);  // IPv4 through a socket of IPv6
  if (found.starts_with("127.") || found == "::1") return std::nullopt;
  return found;
}

std::optional<Connection> connection(int descriptor) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  const auto socket = socket_of(descriptor);
  if (socket == 0) return std::nullopt;
  if (getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return std::nullopt;
  auto peer = far_address(descriptor);
  if (!peer) return std::nullopt;
  const bool is_silent = std::min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv) > kSilent;
  const bool is_sent_again = info.tcpi_unacked > 0 && info.tcpi_retransmits >= kUnanswered;
  const bool is_unanswered = is_silent && (is_sent_again || info.tcpi_probes >= kUnanswered);
  return Connection{socket, std::move(*peer), is_unanswered, info.tcpi_bytes_acked + info.tcpi_bytes_received};
}

void set(int descriptor, int level, int option, int value) {
  static_cast<void>(setsockopt(descriptor, level, option, &value, sizeof(value)));
}

bool is_asked(int descriptor) {
  int value = 0;
  socklen_t size = sizeof(value);
  return getsockopt(descriptor, SOL_SOCKET, SO_KEEPALIVE, &value, &size) != 0 || value != 0;
}

void let_kernel_ask(int descriptor) {
  set(descriptor, IPPROTO_TCP, TCP_KEEPIDLE, 1);
  set(descriptor, IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set(descriptor, IPPROTO_TCP, TCP_KEEPCNT, kMostProbes);
  set(descriptor, SOL_SOCKET, SO_KEEPALIVE, 1);
}

}  // namespace

void Links::leave() {
  for (const auto& [descriptor, socket] : asked_) {
    if (socket_of(descriptor) == socket) set(descriptor, SOL_SOCKET, SO_KEEPALIVE, 0);
  }
  asked_.clear();
  asks_ = false;
}

void Links::look() {
  const auto now = Clock::now();
  const auto seconds = std::chrono::duration<double>(now - counted_).count();
  std::map<uint64_t, uint64_t> bytes;
  uint64_t moved = 0;
  unanswered_.clear();
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const auto name = entry.path().filename().string();
    int descriptor = -1;
    std::from_chars(name.data(), name.data() + name.size(), descriptor);
    const auto found = connection(descriptor);
    if (!found) continue;
    if (found->is_unanswered) unanswered_.insert(found->peer);
    if (asks_ && !is_asked(descriptor)) {
      let_kernel_ask(descriptor);
      asked_[descriptor] = found->socket;
    }
    bytes[found->socket] = found->bytes;
    if (const auto before = bytes_.find(found->socket); before != bytes_.end()) moved += found->bytes - before->second;
  }
  if (seconds < kCount) return;
  moved_ = static_cast<double>(moved) / seconds;
  bytes_ = std::move(bytes);
  counted_ = now;
}

}  // namespace fastddp
