// Numbers and times for people. All times that come in are Unix seconds.

export const count = (number: number, what: string) =>
  `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;

/** A length of time in its two largest units. */
export function duration(seconds: number): string {
  if (seconds < 0.0995) return `${Math.max(0, Math.round(seconds * 1000))} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(seconds < 1 ? 2 : 1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  const [days, hours, minutes] = [
    Math.floor(whole / 86_400),
    Math.floor(whole / 3600) % 24,
    Math.floor(whole / 60) % 60,
  ];
  if (days) return hours ? `${days} d ${hours} h` : `${days} d`;
  if (hours) return minutes ? `${hours} h ${minutes} min` : `${hours} h`;
  return whole % 60 && minutes < 10 ? `${minutes} min ${whole % 60} s` : `${minutes} min`;
}

export function ago(at: number, now = Date.now() / 1000): string {
  const passed = now - at;
  if (passed < -1) return `in ${duration(-passed)}`;
  return passed < 1 ? "just now" : `${duration(Math.round(passed))} ago`;
}

export const absolute = (at: number) =>
  `${new Date(at * 1000)
    .toISOString()
    .replace("T", " ")
    .slice(0, 23)
    .replace(/\.000$/, "")} UTC`;

/** 12.3 k, 4.56 M: three digits. */
export function short(value: number): string {
  const size = Math.abs(value);
  for (const [unit, factor] of [
    ["G", 1e9],
    ["M", 1e6],
    ["k", 1e3],
  ] as const) {
    if (size >= factor) return `${(value / factor).toPrecision(3)} ${unit}`;
  }
  return Number(value.toPrecision(3)).toString();
}

export const percent = (share: number) =>
  `${(share * 100).toFixed(share > 0.0995 && share < 0.9995 ? 1 : share >= 0.9995 ? 0 : 2)} %`;

/** "worker_crash" → "worker crash". */
export const words = (name: string) => name.replaceAll("_", " ");

export const shape = (mesh: Record<string, number>) =>
  Object.entries(mesh)
    .map(([name, size]) => `${name} ${size}`)
    .join(" × ");

/** A value as one word of a shell command. */
export const quoted = (text: string) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);
