// What the ranks on the mesh canvas are coloured by: how the numbers of the ranks become colours of cells. Pure.
import type { RankColumns, RankMeasurements } from "./api";
import { duration } from "./format";
import type { Layout } from "./mesh_layout";

export const BY = [
  "state",
  "step time",
  "step time without waiting",
  "temperature",
  "age of the process",
  "faults a day of the node",
] as const;
export type By = (typeof BY)[number];

/** Whether agents have to be asked for it. */
export const is_measured = (by: By) => by.startsWith("step time") || by === "temperature";

/** Of a cell of several ranks the largest number counts where one rank keeps the others waiting; elsewhere the mean. */
export const shows_largest = is_measured;

/** A difference that is smaller than this share of the least is noise, and is not drawn in full colour. */
const SHARE_MIN: Partial<Record<By, number>> = {
  "step time": 0.05,
  "step time without waiting": 0.05,
  temperature: 0.2,
};

export function in_words(by: By, number: number): string {
  if (by === "temperature") return `${number.toFixed(0)} °C`;
  return by === "faults a day of the node" ? number.toFixed(4) : duration(number);
}

/** A number of each rank; NaN = not known. */
export function numbers(value: RankColumns, measured: RankMeasurements | null, by: By): Float64Array {
  if (is_measured(by) && measured?.generation !== value.generation)
    return new Float64Array(value.state.length).fill(NaN);
  return Float64Array.from(value.state, (_, rank) => {
    switch (by) {
      case "step time":
        return measured!.step_s[rank] ?? NaN;
      case "step time without waiting": {
        const [step_s, wait_s] = [measured!.step_s[rank], measured!.wait_s[rank]];
        return step_s == null || wait_s == null ? NaN : Math.max(0, step_s - wait_s);
      }
      case "temperature":
        return measured!.temperature_c[rank] ?? NaN;
      case "faults a day of the node":
        return value.faults_per_day[value.node[rank]!]!;
      default: {
        const age_s = value.age_s[rank]!;
        return age_s < 0 ? NaN : age_s;
      }
    }
  });
}

export interface Scale {
  least: number;
  most: number; // of what is known
  top: number; // at which the colour is full: not below `most`
  known: number; // ranks
}

export function scale_of(given: Float64Array, by: By): Scale {
  let [least, most, known] = [Number.POSITIVE_INFINITY, Number.NEGATIVE_INFINITY, 0];
  for (const number of given) {
    if (Number.isNaN(number)) continue;
    known += 1;
    least = Math.min(least, number);
    most = Math.max(most, number);
  }
  return { least, most, top: Math.max(most, least * (1 + (SHARE_MIN[by] ?? 0))), known };
}

/** Of each cell: 0 … 1 from the least to the largest number, -1 = no rank of it is known, -2 = it has no rank. */
export function shares(given: Float64Array, shape: Layout, scale: Scale, largest: boolean): Float32Array {
  const cells = shape.columns * shape.rows;
  const [found, counts] = [new Float64Array(cells), new Int32Array(cells)];
  const drawn = new Uint8Array(cells);
  shape.cell_of.forEach((cell, rank) => {
    const number = given[rank]!;
    drawn[cell] = 1;
    if (Number.isNaN(number)) return;
    found[cell] = largest ? (counts[cell] ? Math.max(found[cell]!, number) : number) : found[cell]! + number;
    counts[cell]! += 1;
  });
  return Float32Array.from(found, (number, cell) => {
    if (!drawn[cell]) return -2;
    if (!counts[cell]) return -1;
    const shown = largest ? number : number / counts[cell]!;
    return scale.top > scale.least ? (shown - scale.least) / (scale.top - scale.least) : 0;
  });
}

/** The ranks with the largest numbers, the largest first. */
export function largest(given: Float64Array, wanted: number): number[] {
  const found: number[] = [];
  for (let rank = 0; rank < given.length; rank++) {
    const number = given[rank]!;
    if (Number.isNaN(number) || (found.length === wanted && number <= given[found.at(-1)!]!)) continue;
    let place = found.length;
    while (place && given[found[place - 1]!]! < number) place -= 1;
    found.splice(place, 0, rank);
    if (found.length > wanted) found.pop();
  }
  return found;
}
