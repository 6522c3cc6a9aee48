// The Python edge: addresses and sizes in, plain values out. No policy here, and no torch: tensors come as addresses,
// which the Python side has checked.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <chrono>

#include "common/balance.h"
#include "cpu/parallel.h"
#include "cpu/plan.h"
#include "cpu/pool.h"
#include "cpu/rows.h"
#include "cpu/shared.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace moonep {
namespace {

using Address = uintptr_t;
using Addresses = std::vector<Address>;
using Unlocked = nb::call_guard<nb::gil_scoped_release>;

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

template <typename T>
std::vector<T*> at(const Addresses& addresses) {
  std::vector<T*> pointers;
  pointers.reserve(addresses.size());
  for (Address address : addresses) pointers.push_back(at<T>(address));
  return pointers;
}

// The addresses of the tensors of moonep/plan.py's Crossings, in their order.
using CrossingAddresses = std::array<Address, 5>;

Crossings crossings(const CrossingAddresses& a) {
  return {at<const int32_t>(a[0]), at<const int32_t>(a[1]), at<const int32_t>(a[2]), at<const int32_t>(a[3]),
          at<const int32_t>(a[4])};
}

CrossingArrays crossing_arrays(const CrossingAddresses& a) {
  return {at<int32_t>(a[0]), at<int32_t>(a[1]), at<int32_t>(a[2]), at<int32_t>(a[3]), at<int32_t>(a[4])};
}

// ---- Pool.Block as a Python buffer, so that torch.frombuffer can hold it ----

int block_get_buffer(PyObject* self, Py_buffer* view, int flags) {
  Pool::Block* block = nb::inst_ptr<Pool::Block>(nb::handle(self));
  return PyBuffer_FillInfo(view, self, block->data(), static_cast<Py_ssize_t>(block->bytes()), 0, flags);
}

PyType_Slot block_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(block_get_buffer)}, {0, nullptr}};

// ---- SharedGroup ----

// Waits in slices, so that Ctrl-C works: signals are handled between them, with the interpreter's lock held.
std::tuple<int, int64_t, uint64_t> wait(SharedGroup& group, double timeout_secs) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_secs);
  const int slice_ms = static_cast<int>(std::min(100.0, std::max(1.0, timeout_secs * 1000)));
  while (true) {
    SharedGroup::Outcome outcome;
    {
      nb::gil_scoped_release unlocked;
      outcome = group.wait(slice_ms);
    }
    if (outcome.kind != SharedGroup::Outcome::kPending || std::chrono::steady_clock::now() >= end)
      return {static_cast<int>(outcome.kind), outcome.rank, outcome.error};
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

}  // namespace
}  // namespace moonep

NB_MODULE(_C, m) {
  using namespace moonep;
  nb::set_leak_warnings(false);  // a Buffer that lives until the interpreter ends is not a leak
  m.doc() = "Native parts of MoonEP. Arguments are addresses (int) and sizes; the Python callers check them.";
  m.attr("HEADER_BYTES") = static_cast<int>(kHeaderBytes);

  m.def("row_kernels", [] { return std::string(row_kernels().name); });
  m.def("use_row_kernels", [](const std::string& name) { return use_row_kernels(name.c_str()); }, "name"_a);

  m.def(
      "stream_copy",
      [](Address dst, Address src, int64_t num_bytes, int64_t threads) {
        constexpr int64_t kBlock = 4096;  // threads begin at multiples of it
        parallel_for((num_bytes + kBlock - 1) / kBlock, threads, 256, [&](int64_t begin, int64_t end) {
          const int64_t from = begin * kBlock, to = std::min(end * kBlock, num_bytes);
          row_kernels().stream(at<char>(dst) + from, at<const char>(src) + from, to - from);
          row_kernels().fence();
        });
      },
      "dst"_a, "src"_a, "num_bytes"_a, "threads"_a, Unlocked(), "Copies past the caches.");
  m.def(
      "copy",
      [](Address dst, Address src, int64_t num_bytes, int64_t threads) {
        parallel_for(num_bytes, threads, 1 << 20, [&](int64_t begin, int64_t end) {
          std::memcpy(at<char>(dst) + begin, at<const char>(src) + begin, end - begin);
        });
      },
      "dst"_a, "src"_a, "num_bytes"_a, "threads"_a, Unlocked());

  // ---- plan ----
  m.def(
      "load_ids",
      [](Address ids, int64_t id_bytes, int64_t tokens, int64_t top_k, int64_t stride_t, int64_t stride_k,
         int64_t experts, Address dense, Address counts) {
        return id_bytes == 8 ? load_ids(at<const int64_t>(ids), tokens, top_k, stride_t, stride_k, experts,
                                        at<int32_t>(dense), at<int32_t>(counts))
                             : load_ids(at<const int32_t>(ids), tokens, top_k, stride_t, stride_k, experts,
                                        at<int32_t>(dense), at<int32_t>(counts));
      },
      "ids"_a, "id_bytes"_a, "tokens"_a, "top_k"_a, "stride_t"_a, "stride_k"_a, "experts"_a, "dense"_a, "counts"_a,
      Unlocked(), "Returns the flat index of the first id out of range, or -1.");

  m.def(
      "drop_overflow",
      [](const Addresses& ids_of_rank, const Addresses& weights_of_rank, const Addresses& counts_of_rank,
         const std::vector<int64_t>& tokens_of_rank, int64_t top_k, int64_t experts, int64_t capacity) {
        drop_overflow(at<int32_t>(ids_of_rank), at<const float>(weights_of_rank), at<int32_t>(counts_of_rank),
                      tokens_of_rank.data(), top_k, experts, capacity);
      },
      "ids_of_rank"_a, "weights_of_rank"_a, "counts_of_rank"_a, "tokens_of_rank"_a, "top_k"_a, "experts"_a,
      "capacity"_a, Unlocked());

  m.def(
      "balance",
      [](Address totals, int64_t experts, int64_t ranks, int64_t limit, int64_t slots, bool exact_shares,
         Address replica_experts, Address replica_rows, Address rank_rows) {
        const Homes homes{experts, ranks};
        std::vector<int64_t> scratch(Balancer::scratch_size(homes));
        const Replicas out{at<int64_t>(replica_experts), at<int64_t>(replica_rows), at<int64_t>(rank_rows)};
        Balancer(homes, at<const int64_t>(totals), limit, slots, out, scratch.data()).run(exact_shares);
      },
      "totals"_a, "experts"_a, "ranks"_a, "limit"_a, "slots"_a, "exact_shares"_a, "replica_experts"_a, "replica_rows"_a,
      "rank_rows"_a, Unlocked(),
      "All arrays int64: totals [E]; written: replica_experts and replica_rows [R, slots], rank_rows [R].");

  nb::class_<Planner>(m, "Planner")
      .def(nb::init<int64_t, std::vector<int64_t>, int64_t, int64_t, int64_t>(), "rank"_a, "host_of_rank"_a,
           "experts"_a, "top_k"_a, "alignment"_a)
      .def(
          "set_counts",
          [](Planner& self, const Addresses& counts_of_rank) { self.set_counts(at<const int32_t>(counts_of_rank)); },
          "counts_of_rank"_a, Unlocked())
      .def("balance", &Planner::balance, "limit"_a, "slots"_a, "exact_shares"_a, Unlocked())
      .def("lay_out", &Planner::lay_out, "group_rows"_a, "num_rows"_a, Unlocked(),
           "Rows of every group, and of this rank; -1: as many as are counted.")
      .def_prop_ro("total_rows", &Planner::total_rows)
      .def_prop_ro("num_rows", &Planner::num_rows)
      .def_prop_ro("most_rows", &Planner::most_rows)
      .def_prop_ro("num_groups", &Planner::num_groups)
      .def_prop_ro("routes_out", &Planner::routes_out)
      .def_prop_ro("routes_in", &Planner::routes_in)
      .def(
          "write_groups",
          [](const Planner& self, Address group_experts, Address group_sizes, Address group_ends, Address rank_rows,
             Address replicas) {
            self.write_groups(at<int64_t>(group_experts), at<int64_t>(group_sizes), at<int32_t>(group_ends),
                              at<int64_t>(rank_rows), at<int64_t>(replicas));
          },
          "group_experts"_a, "group_sizes"_a, "group_ends"_a, "rank_rows"_a, "replicas"_a)
      .def(
          "write_routes",
          [](const Planner& self, Address routes_between) { self.write_routes(at<int64_t>(routes_between)); },
          "routes_between"_a)
      .def(
          "number_outgoing",
          [](const Planner& self, Address ids, int64_t tokens, Address dst_rank, Address dst_row,
             const CrossingAddresses& out) {
            return self.number_outgoing(at<const int32_t>(ids), tokens, at<int64_t>(dst_rank), at<int64_t>(dst_row),
                                        crossing_arrays(out));
          },
          "ids"_a, "tokens"_a, "dst_rank"_a, "dst_row"_a, "outbox"_a, Unlocked())
      .def(
          "number_incoming",
          [](const Planner& self, const Addresses& ids_of_rank, const std::vector<int64_t>& tokens_of_rank,
             const CrossingAddresses& in) {
            return self.number_incoming(at<const int32_t>(ids_of_rank), tokens_of_rank.data(), crossing_arrays(in));
          },
          "ids_of_rank"_a, "tokens_of_rank"_a, "inbox"_a, Unlocked())
      .def(
          "pack_words",
          [](const Planner& self, Address ids, const CrossingAddresses& out, Address words) {
            self.pack_words(at<const int32_t>(ids), crossing_arrays(out), at<int32_t>(words));
          },
          "ids"_a, "outbox"_a, "words"_a, Unlocked())
      .def(
          "unpack_words",
          [](const Planner& self, Address words, const std::vector<int64_t>& words_of_rank,
             const CrossingAddresses& in) {
            return self.unpack_words(at<const int32_t>(words), words_of_rank.data(), crossing_arrays(in));
          },
          "words"_a, "words_of_rank"_a, "inbox"_a, Unlocked());

  // ---- rows ----
  m.def(
      "expand",
      [](Address rows, Address src, int64_t row_bytes, const CrossingAddresses& in, int64_t begin, int64_t end,
         int64_t token_base, int64_t threads) {
        expand(at<char>(rows), at<const char>(src), row_bytes, crossings(in), begin, end, token_base, threads);
      },
      "rows"_a, "src"_a, "row_bytes"_a, "inbox"_a, "begin"_a, "end"_a, "token_base"_a, "threads"_a, Unlocked());
  m.def(
      "expand_scaled",
      [](Address rows, Address src, int64_t width, int dtype, Address row_weights, Address other, Address dots,
         const CrossingAddresses& in, int64_t begin, int64_t end, int64_t token_base, int64_t threads) {
        expand_scaled(at<char>(rows), at<const char>(src), width, static_cast<Dtype>(dtype),
                      at<const float>(row_weights), at<const char>(other), at<float>(dots), crossings(in), begin, end,
                      token_base, threads);
      },
      "rows"_a, "src"_a, "width"_a, "dtype"_a, "row_weights"_a, "other"_a, "dots"_a, "inbox"_a, "begin"_a, "end"_a,
      "token_base"_a, "threads"_a, Unlocked());
  m.def(
      "sum_crossings",
      [](Address dst, Address rows, int64_t width, int dtype, Address row_weights, const CrossingAddresses& in,
         int64_t begin, int64_t end, bool payload_wire, int64_t threads) {
        sum_crossings(at<char>(dst), at<const char>(rows), width, static_cast<Dtype>(dtype),
                      at<const float>(row_weights), crossings(in), begin, end, payload_wire, threads);
      },
      "dst"_a, "rows"_a, "width"_a, "dtype"_a, "row_weights"_a, "inbox"_a, "begin"_a, "end"_a, "payload_wire"_a,
      "threads"_a, Unlocked());
  m.def(
      "pack",
      [](Address dst, Address src, int64_t row_bytes, const CrossingAddresses& out, int64_t begin, int64_t end,
         int64_t threads) { pack(at<char>(dst), at<const char>(src), row_bytes, crossings(out), begin, end, threads); },
      "dst"_a, "src"_a, "row_bytes"_a, "outbox"_a, "begin"_a, "end"_a, "threads"_a, Unlocked());
  m.def(
      "finish",
      [](Address y, int64_t width, int dtype, const std::vector<int64_t>& order, const std::vector<bool>& opens_host,
         const Addresses& sums_of_rank, const std::vector<int64_t>& first_crossing, bool payload_wire, int64_t own_rank,
         Address own_rows, Address own_weights, const CrossingAddresses& out, const CrossingAddresses& in,
         int64_t begin, int64_t end, int64_t threads) {
        Sums sums{order,
                  opens_host,
                  {},
                  first_crossing,
                  payload_wire,
                  own_rank,
                  at<const char>(own_rows),
                  at<const float>(own_weights),
                  {},
                  {}};
        for (Address address : sums_of_rank) sums.of_rank.push_back(at<const char>(address));
        finish(at<char>(y), width, static_cast<Dtype>(dtype), sums, crossings(out), crossings(in), begin, end, threads);
      },
      "y"_a, "width"_a, "dtype"_a, "order"_a, "opens_host"_a, "sums_of_rank"_a, "first_crossing"_a, "payload_wire"_a,
      "own_rank"_a, "own_rows"_a, "own_weights"_a, "outbox"_a, "inbox"_a, "begin"_a, "end"_a, "threads"_a, Unlocked());
  m.def(
      "finish_from_rows",
      [](Address y, int64_t width, int dtype, const std::vector<int64_t>& order, const std::vector<bool>& opens_host,
         const Addresses& rows_of_rank, const Addresses& weights_of_rank, bool payload_wire, int64_t own_rank,
         const CrossingAddresses& out, const CrossingAddresses& in, int64_t tokens, int64_t threads) {
        const Sums sums{order,
                        opens_host,
                        {},
                        {},
                        payload_wire,
                        own_rank,
                        nullptr,
                        nullptr,
                        at<const char>(rows_of_rank),
                        at<const float>(weights_of_rank)};
        finish(at<char>(y), width, static_cast<Dtype>(dtype), sums, crossings(out), crossings(in), 0, tokens, threads);
      },
      "y"_a, "width"_a, "dtype"_a, "order"_a, "opens_host"_a, "rows_of_rank"_a, "weights_of_rank"_a, "payload_wire"_a,
      "own_rank"_a, "outbox"_a, "inbox"_a, "tokens"_a, "threads"_a, Unlocked());
  m.def(
      "zero_padding",
      [](Address rows, int64_t num_rows, int64_t row_bytes, Address group_sizes, Address group_ends, int64_t groups) {
        zero_padding(at<char>(rows), num_rows, row_bytes, at<const int64_t>(group_sizes), at<const int32_t>(group_ends),
                     groups);
      },
      "rows"_a, "num_rows"_a, "row_bytes"_a, "group_sizes"_a, "group_ends"_a, "groups"_a, Unlocked());
  m.def(
      "move_floats",
      [](Address dst, Address dst_index, int64_t dst_base, Address src, Address src_index, int64_t src_base,
         int64_t count) {
        move_floats(at<float>(dst), at<const int32_t>(dst_index), dst_base, at<const float>(src),
                    at<const int32_t>(src_index), src_base, count);
      },
      "dst"_a, "dst_index"_a, "dst_base"_a, "src"_a, "src_index"_a, "src_base"_a, "count"_a, Unlocked());

  m.def(
      "situ_glu",
      [](Address out, Address gate_up, int64_t num_rows, int64_t width, int dtype, int64_t threads) {
        situ_glu(at<char>(out), at<const char>(gate_up), num_rows, width, static_cast<Dtype>(dtype), threads);
      },
      "out"_a, "gate_up"_a, "num_rows"_a, "width"_a, "dtype"_a, "threads"_a, Unlocked());
  m.def(
      "situ_glu_backward",
      [](Address grad_gate_up, Address gate_up, Address grad, int64_t num_rows, int64_t width, int dtype,
         int64_t threads) {
        situ_glu_backward(at<char>(grad_gate_up), at<const char>(gate_up), at<const char>(grad), num_rows, width,
                          static_cast<Dtype>(dtype), threads);
      },
      "grad_gate_up"_a, "gate_up"_a, "grad"_a, "num_rows"_a, "width"_a, "dtype"_a, "threads"_a, Unlocked());

  // ---- memory ----
  nb::class_<Pool::Block>(m, "Block", nb::type_slots(block_slots)).def_prop_ro("address", [](const Pool::Block& self) {
    return reinterpret_cast<Address>(self.data());
  });
  nb::class_<Pool>(m, "Pool")
      .def(nb::new_([] { return std::make_shared<Pool>(); }))
      .def("take", &Pool::take, "num_bytes"_a)
      .def("close", &Pool::close)
      .def_prop_ro("free_bytes", &Pool::free_bytes)
      .def_prop_ro("used_bytes", &Pool::used_bytes);

  nb::class_<SharedGroup>(m, "SharedGroup")
      .def(nb::init<int64_t, int64_t, size_t>(), "rank"_a, "ranks"_a, "staging_bytes"_a, Unlocked())
      .def_prop_ro("segment_fd", &SharedGroup::segment_fd)
      .def_prop_ro("nonce", [](const SharedGroup& self) { return nb::bytes(self.nonce(), kNonceBytes); })
      .def(
          "connect",
          [](SharedGroup& self, int64_t peer, int64_t pid, int fd, const nb::bytes& nonce) {
            return self.connect(peer, pid, fd, std::string(nonce.c_str(), nonce.size()));
          },
          "peer"_a, "pid"_a, "fd"_a, "nonce"_a, "Returns why the peer's memory cannot be shared, or an empty string.")
      .def("release_fd", &SharedGroup::release_fd)
      .def_prop_ro("phase", &SharedGroup::phase)
      .def(
          "write_header",
          [](SharedGroup& self, int64_t rank, const nb::bytes& header) {
            std::memcpy(self.header(rank, self.phase()), header.c_str(), std::min(header.size(), kHeaderBytes));
          },
          "rank"_a, "header"_a)
      .def(
          "read_header",
          [](const SharedGroup& self, int64_t rank) {
            return nb::bytes(self.header(rank, self.phase() - 1), kHeaderBytes);
          },
          "rank"_a, "The header that `rank` wrote in the phase announced last.")
      .def(
          "staging",
          [](const SharedGroup& self, int64_t rank, uint32_t phase) {
            return reinterpret_cast<Address>(self.staging(rank, phase));
          },
          "rank"_a, "phase"_a)
      .def("announce", &SharedGroup::announce)
      .def("wait", &wait, "timeout_secs"_a,
           "Waits for every peer's announcement. Returns (kind, rank, recorded error); kinds: 0 done, 1 timed out, "
           "2 lost, 3 closed, 4 error recorded.")
      .def("record_error", &SharedGroup::record_error, "error"_a)
      .def_prop_ro("recorded_error", &SharedGroup::recorded_error)
      .def("cancel", &SharedGroup::cancel)
      .def("close", &SharedGroup::close);

  m.def("open_pidfd", &open_pidfd, "pid"_a);
  m.def("is_alive", &is_alive, "pidfd"_a);
}
