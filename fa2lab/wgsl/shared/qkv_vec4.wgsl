// Q, K and V by the vec4, for D a multiple of 4. `start` is where a row starts, in elements.
// Expects: q, k, v: array<Stored>. Constants: alias Stored = vec4<f32> or vec4<f16>.

fn q_vec4(start: u32, chunk: u32) -> vec4<f32> {
  return vec4<f32>(q[start / 4u + chunk]);
}

fn k_vec4(start: u32, chunk: u32) -> vec4<f32> {
  return vec4<f32>(k[start / 4u + chunk]);
}

fn v_vec4(start: u32, chunk: u32) -> vec4<f32> {
  return vec4<f32>(v[start / 4u + chunk]);
}
