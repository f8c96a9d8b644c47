"""Cases of test_math.py: (expected answer, reply or answer, outcome). Written from what
math-verify's documentation promises and from bugs that other systems' graders had."""

# Of each line the first is the expected answer, and the others are equal to it, or are not.
EQUAL = r"""
18 | 18 | 18. | $18 | \$18.00 | 18.0 | $18$ | +18
1000 | 1,000 | 1{,}000
1,000 | 1000
1{,}000 | 1000
1,000,000 | 1000000
1\,000 | 1000
-3 | -3 | \u22123 | - 3
-\$5 | -5
0 | -0
0.5 | .5 | 50%
.5 | 0.50
1/2 | 0.5 | \frac{1}{2} | \dfrac{1}{2} | \tfrac{1}{2} | \frac12 | 2/4
\frac{1}{2} | 1/2
-\frac{1}{2} | -0.5
-1/2 | \frac{-1}{2} | \frac{1}{-2}
3/2 | 1 1/2 | 1\frac{1}{2} | 1\frac12
1 1/2 | 1.5
2\frac{3}{4} | 2.75
50% | 50% | 50\% | 50 | 1/2
1/2 | 1/2, or 0.5 | 0.5 or 1/2 | \frac{1}{2} \text{ or } 0.5 | 1/2 or 0.5 or 50% | The answer is 1/2, or 0.5.
1 1/2 | 1.5 or 3/2
50\% | 0.5
9 | 9\%
12.5% | \frac{1}{8}
50 percent | 50%
5 cm | 5
5 | 5\text{ cm} | 5 \mathrm{cm} | 5 apples | x = 5 | n=5 | 2+3=5
12 | 12 square units
10 | 10\text{ cm}^2
60 | 60 mph
90 | 90^\circ | 90^{\circ} | 90°
45 degrees | 45
3 | 3 \text{ hours}
7 | \text{7}
x=5 | 5
\sqrt{2} | \sqrt2
\sqrt{8} | 2\sqrt{2}
\frac{\sqrt{2}}{2} | \frac{1}{\sqrt{2}}
2\pi | \pi \cdot 2
\pi/2 | \frac{\pi}{2}
10^3 | 1000
2^{10} | 1024
3 \times 10^2 | 300
(x+1)^2 | x^2+2x+1
x^2+2x+1 | (x+1)^2
2x+1 | 1+2x
\frac{x}{2} | 0.5x
y=2x+1 | y = 2x + 1 | 2x+1=y
x^2+y^2=1 | y^2+x^2=1
\{1,2\} | \{2,1\} | 1,2
\{1,2,3\} | \{3, 2, 1\}
\{1/2, 3\} | \{3, 0.5\}
(1,2) | (1, 2) | \left(1,2\right)
(\frac{1}{2},3) | (0.5, 3)
[0,1) | [0, 1)
(-\infty,2] | (-\infty, 2]
[1,2]\cup[3,4] | [3,4]\cup[1,2]
\begin{pmatrix}1\\2\end{pmatrix} | \begin{bmatrix}1\\2\end{bmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix}1 & 2\\ 3 & 4\end{pmatrix}
\infty | \infty
x>5 | x > 5
x \le 3 | x\leq 3
1,2 | 2,1
A | \text{A}
(A) | \text{(A)}
\text{B} | B
blue | Blue
\text{Monday} | Monday
e^2 | e^{2}
\log 10 | \log(10)
\binom{5}{2} | 10
5! | 120
|-3| | 3
\frac{3}{4}\pi | \frac{3\pi}{4}
i | i
3+2i | 2i+3
100 | 100.
\pm 2 | 2, -2
1 \pm \sqrt{2} | 1+\sqrt{2}, 1-\sqrt{2}
x = 1 \text{ or } x = 2 | 1, 2
1, 2 | x = 2, x = 1
x=1,y=2 | y=2, x=1
x \in [1,2] | [1, 2]
1 < x < 2 | (1, 2)
x \ge 2 | 2 \le x
x > 2 | (2, \infty)
\emptyset | \{\}
3:4 | 3 : 4
\frac{x^2-1}{x-1} | x+1
\cos^2 x+\sin^2 x | 1
\log_2 8 | 3
\sqrt[3]{8} | 2
\text{Alice, Bob} | \text{Alice and Bob}
5\text{ cm}^3 | 5\text{ cubic cm}
\frac{n(n+1)}{2} | \binom{n+1}{2}
\begin{vmatrix}1&2\\3&4\end{vmatrix} | -2
(1,2),(3,4) | (1,2), (3,4)
2^{100} | 1267650600228229401496703205376
33\frac{1}{3} | \frac{100}{3}
"""
UNEQUAL = r"""
18 | 81 | 17.999 | 18.5 | 1 8 | 180
-3 | 3
3 | -3
1000 | 1.000
1/2 | 1/3 | 2 | 2/1 | 1/2 or 0.6 | 2 or 1/2 | 50 or 50% | 0.5 or 1/2 or 2
1 | 1 or 2 | 1 or x | 2 or 2
1/3 | 0.33 | 0.333343 | 0.3
2/3 | 0.666666
50% | 5
50 | 0.5
0.5 | 50 | 0.5%
1 1/2 | 11/2
3/2 | 1/2
2\frac{3}{4} | \frac{23}{4}
(1,2) | (2,1)
[0,1) | [0,1] | (0,1)
\{1,2\} | \{1,2,3\} | \{1\} | 1
x^2 | x^3
x+1 | x-1
y=2x+1 | y=2x-1
x>5 | x<5
x \le 3 | x < 3
\sqrt{2} | 2
2\pi | 6.28
\pi | 3
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}2\\1\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix}1&3\\2&4\end{pmatrix}
A | B
blue | red
\infty | -\infty
3+2i | 3-2i
5! | 5
1/0 | 0
0 | 1/0 | 0.0000001
10^3 | 103
5 | 5 = 5 = 6 | x = 7 \text{ or } x = 5 | x = 7 \lor x = 5 | x = 7 \to x = 5 | 5 \text{ or } 7 | 5, 7 | 5 \pm 2
5 | [4, 6] | \{5, 7\} | 4 < x < 6
5,7 | 5
BAC | ABC
\Omega | \omega
\text{even} | \text{odd}
(1,2),(3,4) | (1,2)
\begin{pmatrix}1&2\end{pmatrix} | \begin{pmatrix}1\\2\end{pmatrix}
1:2 | 2:1
\frac{x}{y} | \frac{y}{x}
12.5% | 1.25
1267650600228229401496703205376 | 1267650600228229401496703205377
1 | 0.9999999
|x| | x
"""

REPLIES = [  # (answer, reply, outcome)
    ("18", r"\boxed{}", "parse_fail"),
    ("5", r"so \boxed{5}", "ok"),
    ("5", r"\boxed{4} no, wait: \boxed{5}", "ok"),
    ("4", r"\boxed{4} no, wait: \boxed{5}", "wrong"),
    ("5", r"the result is \fbox{5}", "ok"),
    ("5", r"\boxed {5}", "ok"),
    ("1/2", r"\boxed{\frac{1}{2}}", "ok"),
    (r"\{1,2\}", r"\boxed{\{2,1\}}", "ok"),
    (r"\frac{\sqrt{3}}{2}", r"\boxed{\dfrac{\sqrt{3}}{2}}", "ok"),
    ("5", r"\boxed{5} because the sum of all the numbers is 5 and 7 is prime.", "ok"),
    ("5", r"\boxed{}", "parse_fail"),
    ("5", r"\boxed{ }", "parse_fail"),
    ("5", r"first \boxed{5}, then \boxed{}", "parse_fail"),
    ("5", r"\boxed{5", "parse_fail"),
    ("5", r"\boxed{4} and \boxed{5", "parse_fail"),
    ("4", r"\boxed{4}. No: \boxed{5", "parse_fail"),  # marin#9163: a draft that was given up
    ("4", r"#### 4. No: \boxed{\frac{1}{2}", "parse_fail"),
    ("5", r"\boxed{4 or \boxed{5}", "ok"),
    ("5", r"\boxed{\text{5 apples}}", "ok"),
    ("5", r"\boxed{x=5}", "ok"),
    ("5", "#### 5", "ok"),
    ("5", "work\n#### 5\n", "ok"),
    ("5", "#### 4\n#### 5", "ok"),
    ("1234", "#### 1,234", "ok"),
    ("5", r"#### 4, that is \boxed{5}", "ok"),
    ("5", "####", "parse_fail"),
    ("5", "The answer is 5", "ok"),
    ("5", "The answer is 5.", "ok"),
    ("5.5", "The answer is 5.5.", "ok"),
    ("5", "Final Answer: 5", "ok"),
    ("5", "the answer is: $5$. I am sure", "ok"),
    ("5", r"the answer is \(5\), since", "ok"),
    ("5", "The answer is 5 because 2+3=5", "ok"),
    ("5", "**Final Answer:** 5", "ok"),
    ("5", "The answer is **5**.", "ok"),
    ("5", "The answer is\n5\nas shown", "ok"),
    ("5", "The answer is 5, which is prime", "ok"),
    ("5", "The answer is 7. No: the answer is 5.", "ok"),
    ("5", "#### 7 so the answer is 5", "wrong"),
    ("1/2", r"\boxed{\text{\frac{1}{2}}}", "ok"),
    ("5", r"\\boxed{5}", "parse_fail"),
    ("5", "The answer is not clear", "wrong"),
    ("5", "5", "parse_fail"),
    ("5", "I think it is 5", "parse_fail"),
    ("5", "", "parse_fail"),
    ("5", "   \n", "parse_fail"),
    ("5", r"\boxed{5}" + " and so on" * 10_000, "ok"),
    ("5", "and so on " * 30_000 + r"\boxed{5}", "ok"),
    ("5", r"\boxed{" + "9" * 100_000 + "}", "parse_fail"),
    ("5", r"\boxed{" + "{" * 50_000, "parse_fail"),
    ("5", r"\boxed{" * 20_000, "parse_fail"),
    ("5", r"\boxed{" + "{" * 300 + "5" + "}" * 300 + "}", "hostile"),
    ("5", r"\boxed{9^{9^{9^{9}}}}", "hostile"),
    ("5", r"\boxed{(((9^9)^9)^9)^9}", "hostile"),
    ("5", r"\boxed{1000000!}", "hostile"),
    ("5", r"\boxed{((10^{10})!)!}", "hostile"),
    ("5", r"\boxed{" + "(" * 900 + "1" + ")" * 900 + "}", "hostile"),
    ("5", r"\boxed{\sum_{i=1}^{10^{12}} i^{7}}", "hostile"),
    ("5", r"\boxed{\int_0^1 x^{x^{x^{x}}} dx}", "hostile"),
    ("5", r"\boxed{x^{100000}+y^{100000}-(x+y)^{100000}}", "hostile"),
    ("x^2", r"\boxed{(x+1)^{5000}-(x+1)^{4999}}", "hostile"),
    ("5", r"\boxed{\prod_{i=1}^{10^{9}} i}", "hostile"),
    ("5", r"\boxed{2^{2^{100}}}", "hostile"),
    ("5", r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}^{10^9}}", "hostile"),
    ("5", r"\boxed{\lim_{x\to 0} x^{x^{x}}/0}", "hostile"),
    ("5", r"\boxed{__import__('os').system('true')}", "hostile"),
    ("5", "\\boxed{\ud800}", "hostile"),
    ("5", "\\boxed{\x00}", "hostile"),
    ("5", r"\boxed{\boxed{5}}", "ok"),
    ("5", r"\boxed{5\\}", "hostile"),
    ("5", r"\boxed{\}", "parse_fail"),
]


def cases():
    """(answer, reply, expected outcome); "hostile" may end in any outcome but ok."""
    for table, outcome in ((EQUAL, "ok"), (UNEQUAL, "wrong")):
        for line in filter(None, table.replace("\\u2212", chr(0x2212)).split("\n")):
            gold, *answers = line.split(" | ")
            yield from ((gold, rf"\boxed{{{answer}}}", outcome) for answer in answers)
    yield from REPLIES
