// How values look: as on the command line, with their units.

const NUMBER = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const TENTHS = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const NOTHING = "–";

export const whole = (value) => NUMBER.format(value);
export const plural = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
export const few = (text, length = 12) => String(text).slice(0, length);

/** Two units at most: 0.4s, 12s, 3m 20s, 2h 05m, 4d 03h. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NOTHING;
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)}ms`;
  if (seconds < 60) return seconds < 9.95 ? `${seconds.toFixed(1)}s` : `${Math.round(seconds)}s`;
  const two = (value) => String(value).padStart(2, "0");
  const minutes = Math.floor(Math.round(seconds) / 60);
  if (minutes < 60) return `${minutes}m ${two(Math.round(seconds) % 60)}s`;
  const hours = Math.floor(minutes / 60);
  return hours < 24 ? `${hours}h ${two(minutes % 60)}m` : `${Math.floor(hours / 24)}d ${two(hours % 24)}h`;
}

export function micros(us) {
  if (us === null || us === undefined) return NOTHING;
  if (us < 1000) return `${us.toFixed(1)}µs`;
  return us < 1e5 ? `${(us / 1e3).toFixed(2)}ms` : `${whole(us / 1e3)}ms`;
}

export function size(bytes) {
  if (bytes === null || bytes === undefined) return NOTHING;
  let value = bytes;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024) return unit === "B" ? `${value} B` : `${TENTHS.format(value)} ${unit}`;
    value /= 1024;
  }
  return `${TENTHS.format(value)} TiB`;
}

export function rate(perSecond, noun = "") {
  if (!perSecond) return NOTHING;
  return `${perSecond < 100 ? TENTHS.format(perSecond) : whole(perSecond)}${noun && ` ${noun}`}/s`;
}

export const percent = (share) => `${Math.floor(share * 100)}%`;
/** Three digits: 0.148, 1,440, 9.2e-5. */
export function significant(value, digits = 3) {
  if (value === null) return NOTHING;
  const rounded = Number(value.toPrecision(digits));
  return rounded !== 0 && Math.abs(rounded) < 1e-3 ? rounded.toExponential() : String(rounded);
}

/** How far away a moment is, in its largest unit: "3m ago", "in 2h". */
export function relative(iso, now = Date.now()) {
  const seconds = (Date.parse(iso) - now) / 1000;
  const distance = Math.abs(seconds);
  if (distance < 5) return "now";
  const [unit, length] = [["d", 86400], ["h", 3600], ["m", 60], ["s", 1]].find((each) => distance >= each[1]);
  const text = `${Math.floor(distance / length)}${unit}`;
  return seconds < 0 ? `${text} ago` : `in ${text}`;
}

const CLOCK = { year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit" };
const ABSOLUTE = new Intl.DateTimeFormat("sv", { ...CLOCK, timeZoneName: "short" });

/** A moment in the reader's own zone: 2026-01-31 02:15:00 CET. */
export const absolute = (iso) => ABSOLUTE.format(new Date(iso));
export const clock = (iso) => new Date(iso).toTimeString().slice(0, 8);

/** `x:float32[4, 3, 32, 32], y:int64[4]` as short as it is clear beside a dtype: 4×3×32×32, y int64 4. */
export function shape(text) {
  return (text ?? "").replace(/([\w.]+):(\w+)\[([\d, ]+)\]/g, (_, name, dtype, sizes) =>
    [name === "x" ? "" : name, /^b?float/.test(dtype) ? "" : dtype, sizes.replaceAll(", ", "×")].filter(Boolean).join(" "),
  );
}
