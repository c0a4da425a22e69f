// The sum of each row of ROW_LANES invocations, twice: through a subgroup that is assumed to hold a whole row, and
// through one that is asked. A demonstration of a mistake: no attention kernel uses it.
//
//   sum_x = Σ value_y over the lanes y of x's row        for every lane x
//
// Every step adds the partial sum of the lane whose number differs in one bit, so that after log2 ROW_LANES steps each
// lane has met all:
//
//   sum_x = sum_x + sum_(x ^ step)        step = 1, 2, 4, … ROW_LANES/2
//
// A shuffle reaches only lanes of the same subgroup. Past it the result is indeterminate: another number, and no error.
//
// A workgroup owns ROWS rows; an invocation owns one value, both of its sums, and records them after every step.
// Dispatch: 1 workgroup. Constants: ROW_LANES, ROWS.
// Source: WGSL specification, built-in functions, subgroupShuffleXor.

const_assert countOneBits(ROW_LANES) == 1u;

@group(0) @binding(0) var<storage, read> value: array<f32>;          // [row, lane]
@group(0) @binding(1) var<storage, read_write> assumed: array<f32>;  // [step, row, lane]
@group(0) @binding(2) var<storage, read_write> measured: array<f32>; // [step, row, lane]

var<workgroup> sum_tile: array<f32, ROWS * ROW_LANES>;

@compute @workgroup_size(ROWS * ROW_LANES)
fn subgroup_row_sum(
  @builtin(local_invocation_index) lane: u32,
  @builtin(subgroup_size) subgroup_size: u32,
) {
  var hoped = value[lane];
  var sound = value[lane];
  var at = lane;
  for (var step = 1u; step < ROW_LANES; step *= 2u) {
    hoped += subgroupShuffleXor(hoped, step);

    let shuffled = subgroupShuffleXor(sound, step);
    sum_tile[lane] = sound;
    workgroupBarrier(); // publishes every lane's partial sum
    sound += select(sum_tile[lane ^ step], shuffled, step < subgroup_size);
    workgroupBarrier(); // every lane has read before the next step overwrites

    assumed[at] = hoped;
    measured[at] = sound;
    at += ROWS * ROW_LANES;
  }
}
