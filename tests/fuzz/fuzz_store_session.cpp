// Fuzzes a server of the store without its sockets: clients greet, send any bytes or requests, end and come again,
// ranks are reported and the job starts again, in any order. Each request is answered once, or waits.
#include <array>
#include <memory>

#include <tandem/parallel/comm/store_hub.h>
#include <tandem/tensor/error.h>

using namespace tandem::parallel;
using namespace tandem::parallel::store_protocol;

namespace {

constexpr std::string_view kSecret = "the secret of this job", kNonce = "32 bytes, which are always same.";

void require(bool ok) {
  if (!ok) __builtin_trap();
}

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : rest_(reinterpret_cast<const char*>(data), size) {}
  bool empty() const { return rest_.empty(); }
  unsigned byte() { return static_cast<unsigned char>(bytes(1)[0]); }
  int number() { return static_cast<int>(byte()) - 2; }
  std::string bytes(std::size_t count) {
    std::string taken(rest_.substr(0, count));
    rest_.remove_prefix(taken.size());
    taken.resize(count);
    return taken;
  }

 private:
  std::string_view rest_;
};

struct Client final : StoreHub::Client {
  void answer(const Reply& reply, bool last) override {
    require(waits_for.empty() && !ended);
    require(parse_reply(encode(reply).substr(4)).value == reply.value);
    --unanswered;
    ended = last;
  }
  int unanswered = 0;
  bool ended = false;
  MessageReader reader;
};

class World {
 public:
  explicit World(bool launched) : hub_(launched) {}

  void step(Input& input) {
    const unsigned what = input.byte();
    std::unique_ptr<Client>& client = clients_[what % clients_.size()];
    switch (what / clients_.size() % 8) {
      case 0:
        greet(client, input);
        break;
      case 1:
        end(client);
        break;
      case 2:
        hub_.report_end(input.number(), "was killed");
        break;
      case 3:
        if (input.byte() % 8 == 0) hub_.begin_restart(input.number());
        break;
      case 4:
        if (client) feed(*client, input.bytes(input.byte()));
        break;
      default:
        if (client) feed(*client, encode(request_from(input)));
    }
    for (std::unique_ptr<Client>& c : clients_)
      if (c && c->ended) end(c);
    for (const std::unique_ptr<Client>& c : clients_) require(!c || c->unanswered == (c->waits_for.empty() ? 0 : 1));
  }

  ~World() {
    for (std::unique_ptr<Client>& c : clients_) end(c);
  }

 private:
  static Request request_from(Input& input) {
    constexpr std::array<std::string_view, 8> keys = {"a", "b", "ended/0", "ended/1", "ended/x", "launcher/a", "", "n"};
    Request r;
    r.command = static_cast<Command>(input.byte() % static_cast<unsigned>(Command::count));
    r.key = keys[input.byte() % keys.size()];
    r.value = input.bytes(input.byte() % 8);
    r.expected = input.bytes(input.byte() % 2);
    return r;
  }

  // With or without one byte that is changed.
  void greet(std::unique_ptr<Client>& client, Input& input) {
    Identity who{.rank = input.number(), .world_size = input.number(), .restart = input.number()};
    who.token = std::string(kTokenBytes, static_cast<char>(input.byte() % 2));
    std::string greeting = make_greeting(who, kSecret, kNonce);
    const std::size_t at = input.byte();
    const bool changed = at < greeting.size();
    if (changed) greeting[at] = static_cast<char>(greeting[at] ^ 1);
    const std::optional<Identity> read = read_greeting(greeting, kSecret, kNonce);
    require(read.has_value() != changed);
    require(answer_to(greeting, kSecret, kNonce).size() == kProofBytes);
    if (!read) return;
    require(read->rank == who.rank && read->world_size == who.world_size && read->restart == who.restart &&
            read->token == who.token);
    end(client);
    client = std::make_unique<Client>();
    client->who = *read;
    client->unanswered = 1;
    hub_.join(*client);
  }

  void feed(Client& client, const std::string& bytes) {
    client.reader.feed(bytes);
    try {
      while (!client.ended && client.waits_for.empty()) {
        const std::optional<std::string> message = client.reader.next();
        if (!message) break;
        const Request request = parse_request(*message);
        ++client.unanswered;
        hub_.request(client, request);
      }
    } catch (const tandem::Error&) {
      client.ended = true;
    }
  }

  void end(std::unique_ptr<Client>& client) {
    if (!client) return;
    if (const std::optional<int> rank = hub_.ended(*client)) hub_.not_explained(*rank, hub_.restart());
    client.reset();
  }

  StoreHub hub_;
  std::array<std::unique_ptr<Client>, 4> clients_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  (void)read_greeting({reinterpret_cast<const char*>(data), size}, kSecret, kNonce);
  World world(input.byte() % 2 == 0);
  while (!input.empty()) world.step(input);
  return 0;
}
