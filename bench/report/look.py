"""The style sheet of a report: light and dark, narrow and wide, screen and paper. Knows no content."""

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1f2328;--soft:#59636e;--faint:#818b98;--line:#d8dee4;--wash:#f6f8fa;
--accent:#0072b2;--good:#0b7a53;--good-wash:#e3f5ec;--bad:#b3400a;--bad-wash:#fdeee4}
@media (prefers-color-scheme:dark){:root{--paper:#0f1318;--ink:#e6edf3;--soft:#a2acb6;--faint:#7d8791;--line:#2b323a;
--wash:#171c23;--accent:#4aa8e0;--good:#4fd1a1;--good-wash:#10291f;--bad:#ff9d63;--bad-wash:#2f1c11}}
*{box-sizing:border-box}
html{scroll-behavior:smooth;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif}
main,header,footer,nav{max-width:72rem;margin:0 auto;padding:0 1.5rem}
header{padding-top:3rem}
h1{font-size:clamp(1.7rem,4vw,2.4rem);line-height:1.15;letter-spacing:-.02em;margin:0 0 .4rem;text-wrap:balance}
h2{font-size:clamp(1.3rem,3vw,1.7rem);line-height:1.25;letter-spacing:-.01em;margin:0 0 .5rem;text-wrap:balance}
h3{font-size:1.06rem;margin:2.4rem 0 .6rem}
p{margin:.5rem 0 1rem;max-width:48rem}
.lead{color:var(--soft);font-size:1.02rem}
.kind{color:var(--accent);font-size:.78rem;font-weight:650;letter-spacing:.08em;
text-transform:uppercase;margin:0 0 .3rem}
.small,figcaption,.note{color:var(--soft);font-size:.86rem}
nav ul{list-style:none;display:flex;flex-wrap:wrap;gap:.4rem 1.2rem;padding:.8rem 0;margin:1.2rem 0 0;
border-bottom:1px solid var(--line)}
a{color:var(--accent);text-decoration:none}a:hover{text-decoration:underline}
section{padding:2.6rem 0 1rem;border-bottom:1px solid var(--line)}section:last-of-type{border:0}
code{font:.9em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.command{display:block;background:var(--wash);border:1px solid var(--line);border-radius:8px;padding:.8rem 1rem;
margin:.8rem 0 1.4rem;white-space:pre-wrap;overflow-wrap:anywhere}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(15rem,1fr));gap:1rem;margin:1.4rem 0}
.card{border:1px solid var(--line);border-top:4px solid var(--mark);border-radius:8px;padding:1rem 1.2rem;
background:var(--wash)}
.card h4{margin:0;font-size:.95rem;overflow-wrap:anywhere}
.card strong{display:block;font-size:2.2rem;line-height:1.15;letter-spacing:-.02em;margin:.3rem 0 .1rem;
font-variant-numeric:tabular-nums}
.card p{margin:0 0 .7rem;color:var(--soft);font-size:.82rem;line-height:1.35}
.card ul{list-style:none;margin:0;padding:0;font-size:.86rem;font-variant-numeric:tabular-nums}
.wide{overflow-x:auto;border:1px solid var(--line);border-radius:8px;-webkit-overflow-scrolling:touch}
table{border-collapse:collapse;width:100%;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{padding:.42rem .65rem;text-align:right;vertical-align:baseline;border-bottom:1px solid var(--line)}
tr:last-child td,tr:last-child th{border-bottom:0}
thead th{background:var(--wash);font-weight:600;line-height:1.3;vertical-align:bottom;min-width:3.8rem}
tbody th{font-weight:500;text-align:left;position:sticky;left:0;background:var(--paper);white-space:nowrap}
thead th:first-child{position:sticky;left:0}
.left{text-align:left}
tbody tr:hover td,tbody tr:hover th{background:var(--wash)}
td small{display:block;color:var(--faint);font-size:.78rem;line-height:1.3;white-space:nowrap}
td.good small,td.bad small,td.muted small{white-space:normal;min-width:8rem;max-width:12rem;
margin-left:auto;font-weight:400}
.good{color:var(--good);font-weight:600}.bad{color:var(--bad);font-weight:600}.muted{color:var(--soft)}
figure{margin:2rem 0 .4rem}figure img{display:block;width:100%;height:auto}
.picture{overflow-x:auto}
details{margin:1.4rem 0;border:1px solid var(--line);border-radius:8px;padding:.2rem 1.2rem}
summary{cursor:pointer;padding:.6rem 0;font-weight:600}
dl{display:grid;grid-template-columns:minmax(8rem,max-content) 1fr;gap:.35rem 1.4rem;margin:.4rem 0 1rem;
font-size:.88rem}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
.notes{border-left:4px solid var(--bad);background:var(--bad-wash);border-radius:0 8px 8px 0;padding:.7rem 1.2rem;
margin:1.2rem 0;font-size:.9rem}.notes ul{margin:.2rem 0;padding-left:1.1rem}.notes strong{color:var(--bad)}
footer{color:var(--soft);font-size:.84rem;padding-bottom:3rem}
@media (max-width:40rem){main,header,footer,nav{padding-left:1rem;padding-right:1rem}dl{grid-template-columns:1fr;gap:0}
dd{margin-bottom:.5rem}figure img{width:46rem;max-width:none}th,td{padding:.4rem .55rem}}
@media print{body{font-size:11pt}nav{display:none}section{break-inside:auto}figure,table,.card{break-inside:avoid}
.wide{overflow:visible}}
"""
