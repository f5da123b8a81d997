#include "comm/agreement.h"

#include <algorithm>
#include <map>
#include <string_view>

#include "core/error.h"

namespace minillm::comm {
namespace {

using Statements = std::vector<Statement>;

/// Both ends of a long value: paths differ at their ends.
std::string shortened(const std::string& value) {
  constexpr size_t kEnd = kLongestValue / 4;
  if (value.size() <= kLongestValue) return value;
  return value.substr(0, kLongestValue - kEnd) + "…" + value.substr(value.size() - kEnd);
}

/// "rank 1", "ranks 0, 2–7".
std::string text_of(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t first = 0, last = 0; first < ranks.size(); first = ++last) {
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    text += (first > 0 ? ", " : "") + std::to_string(ranks[first]);
    if (last > first) text += (last == first + 1 ? ", " : "–") + std::to_string(ranks[last]);
  }
  return text;
}

std::string encode(std::span<const Statement> statements) {
  std::string text;
  for (const auto& [key, value] : statements) text += key + '\0' + value + '\0';
  return text;
}

/// The inverse; NULs after the last statement are padding.
Statements decode(std::string_view text) {
  Statements statements;
  const auto next = [&text] {
    const size_t end = std::min(text.find('\0'), text.size());
    std::string field(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    return field;
  };
  while (!text.empty() && text.front() != '\0') {
    std::string key = next();
    statements.push_back({std::move(key), next()});
  }
  return statements;
}

std::span<std::byte> bytes_of(std::string& text) {
  return std::as_writable_bytes(std::span(text));
}

/// On rank 0 the statements of all ranks; nothing on the others.
std::vector<Statements> gather(std::span<const Statement> mine, Bootstrap& bootstrap) {
  std::string part = encode(mine), all;
  part.resize(static_cast<size_t>(bootstrap.max(std::ssize(part))));
  if (bootstrap.rank() == 0) all.resize(part.size() * static_cast<size_t>(bootstrap.size()));
  bootstrap.gather(bootstrap.everyone(), bytes_of(part), bytes_of(all));
  std::vector<Statements> of_ranks;
  for (size_t at = 0; at < all.size(); at += part.size())
    of_ranks.push_back(decode(std::string_view(all).substr(at, part.size())));
  return of_ranks;
}

using Values = std::map<std::string, std::string>;

Values values_of(std::span<const Statement> statements) {
  Values values;
  for (const auto& [key, value] : statements) values[key] = value;
  return values;
}

/// Ranks that have the same.
struct Party {
  std::string value;
  std::vector<int> ranks;
};

/// In the order of their first ranks. Ranks that state nothing have rank 0's value, `first`.
std::vector<Party> parties(const std::string& key, const std::string& first,
                           std::span<const Values> of_ranks) {
  std::vector<Party> all;
  for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
    const auto stated = of_ranks[rank].find(key);
    const std::string& value = stated != of_ranks[rank].end() ? stated->second : first;
    auto party = std::ranges::find(all, value, &Party::value);
    if (party == all.end()) {
      if (all.size() <= kMostValues) all.push_back({value, {}});
      party = all.end() - 1;
    }
    party->ranks.push_back(static_cast<int>(rank));
  }
  for (Party& party : all)
    if (party.value.empty()) party.value = "absent";
  if (all.size() > kMostValues) all.back().value = "others";
  return all;
}

/// "train.seed is 0 on ranks 0, 2 and 1 on rank 1"
std::string line(const std::string& key, std::span<const Party> parties) {
  std::string text = key + " is ";
  for (size_t i = 0; i < parties.size(); ++i) {
    if (i > 0) text += i + 1 < parties.size() ? ", " : " and ";
    text += parties[i].value + " on " + text_of(parties[i].ranks);
  }
  return text;
}

}  // namespace

std::vector<Statement> differences(std::span<const Statement> first, std::span<const Statement> mine) {
  Values left = values_of(mine);
  Statements found;
  for (const auto& [key, value] : first) {
    const auto stated = left.extract(key);
    const std::string other = stated.empty() ? "" : stated.mapped();
    if (other != value) found.push_back({key, shortened(other)});
  }
  for (const auto& [key, value] : left)
    if (!value.empty()) found.push_back({key, shortened(value)});
  if (found.size() > kMostDifferences) found.resize(kMostDifferences + 1);
  return found;
}

// The first differences of all ranks are among the first of each, as all list them in the same order. One
// more than is told says that there are others.
std::string disagreement(std::span<const Statement> first, std::span<const Statements> of_ranks) {
  std::vector<Values> stated;
  Values others;  // stated by none but other ranks
  for (const Statements& statements : of_ranks) {
    stated.push_back(values_of(statements));
    others.insert(stated.back().begin(), stated.back().end());
  }
  Statements different;
  for (const auto& [key, value] : first)
    if (others.erase(key) > 0) different.push_back({key, shortened(value)});
  for (const auto& [key, value] : others) different.push_back({key, ""});
  if (different.empty()) return "";

  std::string text = "the ranks were not started alike:\n";
  for (const auto& [key, value] : std::span(different).first(std::min(different.size(), kMostDifferences)))
    text += "  " + line(key, parties(key, value, stated)) + "\n";
  if (different.size() > kMostDifferences) text += "  and there are other differences\n";
  return text + "Start all with the same program, configuration and files";
}

void agree(Bootstrap& bootstrap, std::span<const Statement> statements) {
  const Statements first = decode(broadcast(bootstrap, encode(statements)));
  const Statements different = differences(first, statements);
  if (bootstrap.max(std::ssize(different)) == 0) return;
  const std::vector<Statements> of_ranks = gather(different, bootstrap);
  throw CommunicationError(broadcast(bootstrap, disagreement(first, of_ranks)));
}

}  // namespace minillm::comm
