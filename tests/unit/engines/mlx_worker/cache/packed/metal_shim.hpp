// Just enough of Metal to run one kernel body on a CPU: 32 threads are the lanes of a SIMD group.
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

using uint = uint32_t;
using ushort = uint16_t;
using uchar = uint8_t;
using half = _Float16;

template <class To, class From> To as_type(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

namespace metal {
inline float floor(float x) { return std::floor(x); }
inline float rint(float x) { return std::rint(x); }
inline float clamp(float x, float low, float high) { return std::fmin(std::fmax(x, low), high); }
namespace precise {
inline float sqrt(float x) { return std::sqrt(x); }
}
}

inline std::barrier<> meet(32);
inline thread_local uint own_lane;

// What every lane shows to all others at one point of the kernel.
template <class T> std::vector<T> shown(T value) {
    static T board[32];
    meet.arrive_and_wait();
    board[own_lane] = value;
    meet.arrive_and_wait();
    return std::vector<T>(board, board + 32);
}

inline float simd_shuffle_xor(float x, ushort mask) { return shown(x)[own_lane ^ mask]; }

template <class T> T simd_sum(T x) {
    T total = 0;
    for (T other : shown(x)) total += other;
    return total;
}

struct simd_vote {
    using vote_t = uint64_t;
    vote_t bits = 0;
    explicit operator vote_t() const { return bits; }
};

inline simd_vote simd_ballot(bool vote) {
    simd_vote votes;
    std::vector<uchar> all = shown(uchar(vote));
    for (uint lane = 0; lane < 32; lane++) votes.bits |= simd_vote::vote_t(all[lane]) << lane;
    return votes;
}

struct Position {
    uint x;
};

// Runs body(position, lane) for every row, one SIMD group after the other.
template <class Body> void each_row(uint num_rows, Body body) {
    std::vector<std::thread> lanes;
    for (uint lane = 0; lane < 32; lane++)
        lanes.emplace_back([=] {
            own_lane = lane;
            for (uint row = 0; row < num_rows; row++) body(Position{row * 32 + lane}, lane);
        });
    for (std::thread& lane : lanes) lane.join();
}

template <class T> std::vector<T> read_all(size_t count) {
    std::vector<T> values(count);
    if (std::fread(values.data(), sizeof(T), count, stdin) != count) std::abort();
    return values;
}

template <class T> void write_all(const std::vector<T>& values) {
    std::fwrite(values.data(), sizeof(T), values.size(), stdout);
}
