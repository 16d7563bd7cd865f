// How a product reads each form: `Coding<F>` opens the head of a unit, gives the scale and the least value of a cell (the
// 16 or 32 columns that share them), and the values of four columns of all rows as bytes. A new form is one more of these,
// a line of `layout.h` and a reader in `units.cpp`.

namespace {

constexpr int V = 4 * W;  // bytes of a vector of values

struct Scales {
    Floats scale, least;  // least: what a byte of 0 stands for
};

// -- values of a block of 32: group g (0 to 7) holds columns 4g to 4g + 3. Each reads what `Spread` of that name says.

struct InBytes {
    static Bytes group(const uint8_t* w, int g) { return load_bytes(w + g * V); }
};

struct InNibbles {
    static Bytes group(const uint8_t* w, int g) { return pick(load_bytes(w + g % 4 * V), g < 4 ? 0 : 4, 15); }
};

struct InFive {
    static Bytes group(const uint8_t* w, int g) {
        return join(InNibbles::group(w, g), pick(load_bytes(w + 4 * V), g - 4, 16));
    }
};

struct InTwo {
    static Bytes group(const uint8_t* w, int g) { return pick(load_bytes(w + g / 4 * V), g % 4 * 2, 3); }
};

struct InThree {
    static Bytes group(const uint8_t* w, int g) {
        return join(InTwo::group(w, g), pick(load_bytes(w + 2 * V), g - 2, 4));
    }
};

struct InSix {
    static Bytes group(const uint8_t* w, int g) {
        const Bytes low = pick(load_bytes(w + (g / 4 * 2 + g % 2) * V), g % 4 < 2 ? 0 : 4, 15);
        return join(low, pick(load_bytes(w + (4 + g / 4) * V), g % 4 * 2 - 4, 48));
    }
};

// -- heads

template <int kZero>  // the byte that stands for 0
struct HalfScale {
    using Head = Scales;
    static Head open(const uint8_t* p) {
        const Floats scale = load_half((const uint16_t*)p);
        return {scale, mul(scale, splat(-float(kZero)))};
    }
    static Scales scales(const Head& head, int) { return head; }
};

struct HalfScaleAndLeast {
    using Head = Scales;
    static Head open(const uint8_t* p) { return {load_half((const uint16_t*)p), load_half((const uint16_t*)p + W)}; }
    static Scales scales(const Head& head, int) { return head; }
};

struct PowerOfTwo {
    using Head = Scales;
    static Head open(const uint8_t* p) {
        const Floats scale = load_power(p);
        return {scale, mul(scale, splat(-float(kFp4Raised)))};
    }
    static Scales scales(const Head& head, int) { return head; }
};

struct KHead {
    Floats scale, least;   // factors of a cell's own
    const uint8_t* cells;  // their 8-bit numbers
};

struct ByteScaleAndLeast {
    using Head = KHead;
    static Head open(const uint8_t* p) {
        const uint16_t* halves = (const uint16_t*)p;
        return {load_half(halves), sub(splat(0), load_half(halves + W)), p + 4 * W};
    }
    static Scales scales(const Head& head, int cell) {
        const uint8_t* p = head.cells + 2 * cell * W;
        return {mul(head.scale, load_bits(p, 0, 255)), mul(head.least, load_bits(p + W, 0, 255))};
    }
};

template <int kZero>
struct SignedScale {
    using Head = KHead;
    static Head open(const uint8_t* p) {
        const Floats scale = load_half((const uint16_t*)p);
        return {scale, splat(-float(kZero)), p + 2 * W};
    }
    static Scales scales(const Head& head, int cell) {
        const Floats scale = mul(head.scale, load_signed_bytes(head.cells + cell * W));
        return {scale, mul(scale, head.least)};
    }
};

struct SixBitScale {
    using Head = KHead;
    static Head open(const uint8_t* p) { return {load_half((const uint16_t*)p), splat(-4.0f), p + 2 * W}; }
    static Scales scales(const Head& head, int cell) {
        const Floats low = load_bits(head.cells + cell % 8 * W, cell / 8 * 4, 15);
        const Floats high = load_bits(head.cells + (8 + cell % 4) * W, cell / 4 * 2, 3);
        const Floats scale = mul(head.scale, sub(fma(high, splat(16.0f), low), splat(32.0f)));
        return {scale, mul(scale, head.least)};
    }
};

struct NibbleScaleAndLeast {
    using Head = KHead;
    static Head open(const uint8_t* p) { return ByteScaleAndLeast::open(p); }
    static Scales scales(const Head& head, int cell) {
        const uint8_t* p = head.cells + cell * W;
        return {mul(head.scale, load_bits(p, 0, 15)), mul(head.least, load_bits(p, 4, 15))};
    }
};

// -- forms

// kIsSigned: bytes have signs, and there is no least value.
template <class Values, class Heads, int kCellColumns, bool kHasSigns = false>
struct Coded : Heads {
    static constexpr int kCell = kCellColumns;
    static constexpr bool kIsSigned = kHasSigns;
    static Bytes group(const uint8_t* w, int g) { return Values::group(w, g); }
};

struct Fp4Values {
    static Bytes group(const uint8_t* w, int g) { return look_up(InNibbles::group(w, g), kFp4Values); }
};
struct UnevenValues {
    static Bytes group(const uint8_t* w, int g) { return look_up(InNibbles::group(w, g), kUnevenValues); }
};

template <Form F>
struct Coding;
template <> struct Coding<Form::kQ8_0> : Coded<InBytes, HalfScale<0>, 32, true> {};
template <> struct Coding<Form::kQ4_0> : Coded<InNibbles, HalfScale<8>, 32> {};
template <> struct Coding<Form::kQ4_1> : Coded<InNibbles, HalfScaleAndLeast, 32> {};
template <> struct Coding<Form::kQ5_0> : Coded<InFive, HalfScale<16>, 32> {};
template <> struct Coding<Form::kQ5_1> : Coded<InFive, HalfScaleAndLeast, 32> {};
template <> struct Coding<Form::kIQ4_NL> : Coded<UnevenValues, HalfScale<0>, 32, true> {};
template <> struct Coding<Form::kMXFP4> : Coded<Fp4Values, PowerOfTwo, 32> {};
template <> struct Coding<Form::kQ4_K> : Coded<InNibbles, ByteScaleAndLeast, 32> {};
template <> struct Coding<Form::kQ5_K> : Coded<InFive, ByteScaleAndLeast, 32> {};
template <> struct Coding<Form::kQ6_K> : Coded<InSix, SignedScale<32>, 16> {};
template <> struct Coding<Form::kQ3_K> : Coded<InThree, SixBitScale, 16> {};
template <> struct Coding<Form::kQ2_K> : Coded<InTwo, NibbleScaleAndLeast, 16> {};
template <> struct Coding<Form::kIQ4_XS> : Coded<UnevenValues, SignedScale<0>, 32, true> {};

}  // namespace
