"""How the report page looks: wide and narrow, light and dark.

f'<style>{report_style.STYLE}</style>'
"""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f6f4;
  --card: #ffffff;
  --text: #1d2127;
  --faint: #646d7a;
  --line: #e2e3e1;
  --bar: #4a6fd8;
  --band: #e7ecf9;
  --mark: #d0452b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14161a;
    --card: #1d2026;
    --text: #e6e8eb;
    --faint: #98a0ae;
    --line: #31353d;
    --bar: #7b9cf4;
    --band: #272e40;
    --mark: #ff8b6b;
  }
}
* { box-sizing: border-box; margin: 0; }
body {
  background: var(--page);
  color: var(--text);
  font: 16px/1.5 system-ui, sans-serif;
  font-variant-numeric: tabular-nums;
}
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 34px; line-height: 1.2; letter-spacing: -0.02em; overflow-wrap: anywhere; }
h2 { font-size: 20px; line-height: 1.3; }
h3 { font-size: 15px; }
code {
  font: 13px ui-monospace, 'SF Mono', Menlo, Consolas, monospace;
  overflow-wrap: anywhere;
}
header p, .note { color: var(--faint); margin-top: 4px; }
.note { font-size: 14px; max-width: 80ch; }
section, .figures div {
  background: var(--card);
  border: 1px solid var(--line);
  border-radius: 12px;
}
section { padding: 24px; margin-top: 20px; }

.figures {
  display: grid;
  grid-template-columns: repeat(auto-fit, minmax(150px, 1fr));
  gap: 12px;
  margin-top: 24px;
}
.figures div {
  display: flex;
  flex-direction: column-reverse;
  justify-content: flex-end;
  padding: 16px 20px;
}
.figures dd { font-size: 24px; line-height: 1.2; font-weight: 600; }
.figures dt { color: var(--faint); font-size: 14px; }

.grid {
  display: grid;
  grid-template-columns: repeat(auto-fill, minmax(150px, 1fr));
  gap: 24px 16px;
  margin-top: 20px;
}
.grid img {
  display: block;
  width: 100%;
  height: auto;
  aspect-ratio: 1;
  border-radius: 8px;
  box-shadow: 0 0 0 1px var(--line);
}
.grid summary {
  display: -webkit-box;
  -webkit-box-orient: vertical;
  -webkit-line-clamp: 3;
  overflow: hidden;
  overflow-wrap: anywhere;
  list-style: none;
  cursor: pointer;
  font-size: 13px;
  line-height: 1.4;
  margin-top: 8px;
}
.grid summary::-webkit-details-marker { display: none; }
.grid details[open] summary { -webkit-line-clamp: none; }
.grid code { color: var(--faint); font-size: 12px; }

.columns { display: grid; grid-template-columns: 2fr 3fr; gap: 0 20px; align-items: start; }
table { width: 100%; border-collapse: collapse; margin-top: 12px; font-size: 14px; }
th, td { border-bottom: 1px solid var(--line); padding: 8px 0 8px 16px; text-align: right; }
th { font-weight: 500; color: var(--faint); }
td { vertical-align: top; white-space: nowrap; }
th:first-child, td:first-child { padding-left: 0; text-align: left; white-space: normal; }
tr:last-child td { border-bottom: 0; }
td > code { margin-right: 4px; }
td small { display: block; color: var(--faint); font-size: 13px; }
table + .note { margin-top: 12px; }

.chart { margin-top: 16px; }
.chart svg {
  display: block;
  width: 100%;
  height: 200px;
  border: solid var(--line);
  border-width: 1px 0;
}
.chart rect { fill: var(--bar); }
.chart .band { fill: var(--band); }
.chart line { stroke: var(--mark); stroke-width: 2; vector-effect: non-scaling-stroke; }
.chart p, .ticks { font-size: 12px; color: var(--faint); }
.ticks { position: relative; height: 20px; }
.ticks span { position: absolute; top: 4px; }
.stats { display: flex; flex-wrap: wrap; gap: 8px 32px; margin-top: 16px; }
.stats dt { color: var(--faint); font-size: 13px; }
.stats dd { font-weight: 600; }
.channels {
  display: grid;
  grid-template-columns: repeat(auto-fit, minmax(210px, 1fr));
  gap: 28px 24px;
  margin-top: 20px;
}
.channels svg { height: 130px; }
.channels .chart { margin-top: 8px; }

.origin {
  display: grid;
  grid-template-columns: max-content minmax(0, 1fr);
  gap: 6px 24px;
  margin-top: 12px;
  font-size: 14px;
}
.origin dt { color: var(--faint); }
.origin dd { overflow-wrap: anywhere; }

@media (max-width: 760px) {
  main { padding: 24px 12px 40px; }
  h1 { font-size: 26px; }
  section { padding: 18px 16px; }
  .columns { grid-template-columns: minmax(0, 1fr); }
  .figures { grid-template-columns: 1fr 1fr; }
  .figures div { padding: 12px 16px; }
  .figures dd { font-size: 20px; }
  .figures div:last-child { grid-column: span 2; }
  .grid { grid-template-columns: 1fr 1fr; gap: 20px 12px; }
}
"""
