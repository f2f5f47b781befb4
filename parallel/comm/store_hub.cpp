#include <tandem/parallel/comm/store_hub.h>

#include <algorithm>
#include <charconv>

#include <tandem/parallel/comm/store_limits.h>
#include <tandem/tensor/error.h>

namespace tandem::parallel {

using namespace store_protocol;

namespace {

std::optional<int> rank_of_ended(std::string_view key) {
  if (!key.starts_with(kEndedPrefix)) return std::nullopt;
  key.remove_prefix(kEndedPrefix.size());
  int value = -1;
  const auto [at, error] = std::from_chars(key.data(), key.data() + key.size(), value);
  const bool good = error == std::errc() && at == key.data() + key.size() && value >= 0;
  return good ? std::optional(value) : std::nullopt;
}

}  // namespace

void StoreHub::join(Client& client) {
  if (const std::optional<std::string> why = refusal(client)) return client.answer({Status::refused, *why}, true);
  clients_.insert(&client);
  if (client.who.rank >= 0 && is_launcher(client)) {
    client.present = true;
    ++launchers_[client.who.rank];
    erase(launcher_ended_key(client.who.rank));
  } else if (client.who.rank >= 0) {
    Rank& rank = ranks_[client.who.rank];
    ++rank.connections;
    rank.token = client.who.token;
    rank.left = false;
    rank.lost.reset();
    client.present = true;
    erase(ended_key(client.who.rank));
  }
  client.answer({}, false);
}

std::optional<std::string> StoreHub::refusal(const Client& client) const {
  const Identity& who = client.who;
  if (is_stale(client)) return stale(client).value;
  if (who.rank < 0 || is_launcher(client)) return std::nullopt;
  if (who.world_size < 1) return fmt::format("the world size is {}; it must be at least 1", who.world_size);
  if (who.rank >= who.world_size)
    return fmt::format("rank {} is out of range: the world size is {}", who.rank, who.world_size);
  const auto known = ranks_.find(who.rank);
  if (known != ranks_.end() && known->second.connections > 0 && known->second.token != who.token)
    return fmt::format("rank {} has joined already from another process (two jobs with one MASTER_PORT?)", who.rank);
  return std::nullopt;
}

bool StoreHub::is_stale(const Client& client) const { return !is_launcher(client) && client.who.restart != restart_; }

Reply StoreHub::stale(const Client& client) const {
  return {Status::stale, fmt::format("this rank belongs to start {} of the job, which is at restart {}; it must end",
                                     client.who.restart, restart_)};
}

void StoreHub::request(Client& client, const Request& r) {
  if (is_stale(client)) return client.answer(stale(client), true);
  if (const std::optional<Reply> reply = reply_to(client, r))
    client.answer(*reply, false);
  else
    client.waits_for = r.key;
}

std::optional<Reply> StoreHub::reply_to(Client& client, const Request& r) {
  try {
    if (r.command == Command::goodbye) {
      leave(client);
      return Reply{};
    }
    if (r.command != Command::num_keys) check_sizes(r.key, r.value);
    const auto found = values_.find(r.key);
    const bool there = found != values_.end();
    switch (r.command) {
      case Command::set:
        if (const std::optional<int> rank = rank_of_ended(r.key))
          report_end(*rank, r.value);
        else
          put(r.key, r.value);
        return Reply{};
      case Command::get:
        if (there) return Reply{Status::ok, found->second};
        if (r.key.starts_with(kLauncherPrefix)) return std::nullopt;
        return lost_reply();
      case Command::check:
        return Reply{there ? Status::ok : Status::missing, {}};
      case Command::add: {
        const std::int64_t sum = add_to(r.key, there ? found->second : "", add_to("amount", r.value, 0));
        put(r.key, std::to_string(sum));
        return Reply{Status::ok, std::to_string(sum)};
      }
      case Command::compare_set:
        if (there ? found->second == r.expected : r.expected.empty()) {
          put(r.key, r.value);
          return Reply{Status::ok, r.value};
        }
        return Reply{Status::ok, there ? found->second : ""};
      case Command::remove:
        return Reply{erase(r.key) ? Status::ok : Status::missing, {}};
      case Command::num_keys:
        return Reply{Status::ok, std::to_string(std::count_if(values_.begin(), values_.end(), [&](const auto& entry) {
                       return entry.first.starts_with(r.key);
                     }))};
      default:
        return Reply{Status::refused, "[store] the command is not allowed here"};
    }
  } catch (const Error& e) {
    return Reply{Status::refused, e.what()};
  }
}

std::optional<Reply> StoreHub::lost_reply() const {
  for (const auto& [number, rank] : ranks_)
    if (rank.lost) return Reply{Status::lost, fmt::format("{} {}", number, *rank.lost)};
  return std::nullopt;
}

void StoreHub::put(const std::string& key, const std::string& value) {
  const auto found = values_.find(key);
  const std::size_t before = found == values_.end() ? 0 : key.size() + found->second.size();
  bytes_ = check_room(bytes_, before, key.size() + value.size());
  values_[key] = value;
  for (Client* client : clients_)
    if (client->waits_for == key) {
      client->waits_for.clear();
      client->answer({Status::ok, value}, false);
    }
}

bool StoreHub::erase(const std::string& key) {
  const auto found = values_.find(key);
  if (found == values_.end()) return false;
  bytes_ -= found->first.size() + found->second.size();
  values_.erase(found);
  return true;
}

void StoreHub::leave(Client& client) {
  if (!client.present) return;
  if (is_launcher(client)) return launcher_ended(client);
  client.present = false;
  Rank& rank = ranks_[client.who.rank];
  if (--rank.connections > 0) return;
  rank.left = true;
  put(ended_key(client.who.rank), std::string(kHasLeft));
}

void StoreHub::launcher_ended(Client& client) {
  client.present = false;
  if (--launchers_[client.who.rank] > 0) return;  // a second one with the same number has been sent away
  try {
    put(launcher_ended_key(client.who.rank), "1");
  } catch (const Error&) {  // the store is full; its silence tells the others
  }
}

std::optional<int> StoreHub::ended(Client& client) {
  clients_.erase(&client);
  if (!client.present) return std::nullopt;
  if (is_launcher(client)) {
    launcher_ended(client);
    return std::nullopt;
  }
  client.present = false;
  if (--ranks_[client.who.rank].connections > 0) return std::nullopt;
  if (launched_) return client.who.rank;
  report_end(client.who.rank, "has ended");
  return std::nullopt;
}

void StoreHub::not_explained(int rank, int restart) {
  if (restart != restart_ || ranks_[rank].connections > 0 || values_.count(ended_key(rank)) != 0) return;
  report_end(rank, "has ended");
}

void StoreHub::report_end(int number, const std::string& text) {
  try {
    put(ended_key(number), text);
  } catch (const Error&) {  // the store is full; the rank is lost all the same
  }
  Rank& rank = ranks_[number];
  if (rank.left) return;
  if (!rank.lost) rank.lost = text;
  for (Client* client : clients_)
    if (!client->waits_for.empty() && !client->waits_for.starts_with(kLauncherPrefix)) {
      client->waits_for.clear();
      client->answer({Status::lost, fmt::format("{} {}", number, text)}, false);
    }
}

void StoreHub::begin_restart(int restart) {
  restart_ = restart;
  ranks_.clear();
  std::erase_if(values_, [&](const auto& entry) {
    if (entry.first.starts_with(kLauncherPrefix)) return false;
    bytes_ -= entry.first.size() + entry.second.size();
    return true;
  });
  for (Client* client : clients_) {
    client->present = client->present && is_launcher(*client);
    if (!is_stale(*client) || client->waits_for.empty()) continue;
    client->waits_for.clear();
    client->answer(stale(*client), true);
  }
}

bool StoreHub::others_may_ask() const {
  const auto any = [this](const auto& is_so) {
    return std::any_of(ranks_.begin(), ranks_.end(),
                       [&](const auto& rank) { return rank.first != 0 && is_so(rank.second); });
  };
  // A group keeps why it is broken under such a key (lost_key).
  const bool broken =
      std::any_of(values_.begin(), values_.end(), [](const auto& entry) { return entry.first.ends_with("/lost"); });
  return (broken || any([](const Rank& rank) { return rank.lost || rank.left; })) &&
         any([](const Rank& rank) { return rank.connections > 0; });
}

}  // namespace tandem::parallel
