// What the lanes of a row know together, through workgroup memory: the same steps as row_subgroup.wgsl, so the same
// bits, with two barriers each. For devices without subgroups, or with too small ones.
// Expects: register_tiles.wgsl.

alias RowValues = array<f32, ROWS>;

var<workgroup> row_values: array<array<f32, ROW_LANES>, BLOCK_ROWS>; // [r, group][lane]

fn row_max(values: ptr<function, RowValues>, group: u32, x: u32) {
  for (var step = 1u; step < ROW_LANES; step *= 2u) {
    share(values, group, x);
    for (var r = 0u; r < rolled(ROWS); r++) { // unroll
      (*values)[r] = max((*values)[r], row_values[r * GROUPS + group][x ^ step]);
    }
    workgroupBarrier(); // every lane has read before the next step overwrites
  }
}

fn row_sum(values: ptr<function, RowValues>, group: u32, x: u32) {
  for (var step = 1u; step < ROW_LANES; step *= 2u) {
    share(values, group, x);
    for (var r = 0u; r < rolled(ROWS); r++) { // unroll
      (*values)[r] += row_values[r * GROUPS + group][x ^ step];
    }
    workgroupBarrier(); // every lane has read before the next step overwrites
  }
}

fn share(values: ptr<function, RowValues>, group: u32, x: u32) {
  for (var r = 0u; r < rolled(ROWS); r++) { // unroll
    row_values[r * GROUPS + group][x] = (*values)[r];
  }
  workgroupBarrier(); // publishes every lane's values
}
