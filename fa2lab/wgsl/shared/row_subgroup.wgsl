// What the lanes of a row know together, through subgroups: each step halves the distance to the lane that is asked.
// Every lane ends with the same bits. Needs ROW_LANES neighbouring invocations in one subgroup, which is measured.
// Expects: register_tiles.wgsl.

alias RowValues = array<f32, ROWS>;

fn row_max(values: ptr<function, RowValues>, group: u32, x: u32) {
  for (var step = 1u; step < ROW_LANES; step *= 2u) {
    for (var r = 0u; r < rolled(ROWS); r++) { // unroll
      (*values)[r] = max((*values)[r], subgroupShuffleXor((*values)[r], step));
    }
  }
}

fn row_sum(values: ptr<function, RowValues>, group: u32, x: u32) {
  for (var step = 1u; step < ROW_LANES; step *= 2u) {
    for (var r = 0u; r < rolled(ROWS); r++) { // unroll
      (*values)[r] += subgroupShuffleXor((*values)[r], step);
    }
  }
}
