# ruff: noqa: RUF001
r"""Answers that users of other graders reported, and those that a red team found, with siblings of our own.

A line of a table is `gold <- answer | answer`, as in test_hostile_math.py; \uXXXX is a character.
"""

import itertools
import random
import time

import pytest
from math_pairs import pairs, reports
from test_hostile_math import cases

from judges.math import equal, extract, gold_answer, grade

RIGHT = r"""
A SUM THAT BEGINS WITH A MINUS:: -\frac{5}{2} <- -3+\frac{1}{2} | -3+1/2 | -3 + 1/2 | -2\frac12 | -2 1/2
-2.5 <- -3+1/2
-7/3 <- -3+2/3 | -\frac{7}{3} <- -2-1/3 | -2\frac{1}{3} | -3.5 <- -3\frac12 | -3 1/2 | -4+1/2 | -4 <- -3-2/2
3.5 <- 3+1/2
3.5 <- 3 + \frac12 | 3\frac12 | 3 1/2 | -\frac54 <- -1-\frac14 | -1\frac14
POWERS OF POWERS:: 4^x <- (2^x)^2 | 8^n <- (2^n)^3 | x^{2n} <- (x^n)^2 | e^{2x} <- (e^x)^2 | (2^x)^2 <- 4^x
e^{2x}+2e^x+1 <- (e^x+1)^2 | 1+2^{n+1}+4^n <- (1+2^n)^2 | \frac{1}{e^{2x}} <- (e^{-x})^2 | 9^{x+1} <- 9(3^x)^2
9^{x+1} <- (3^{x+1})^2
2^{6k} <- (8^k)^2 | (4^k)^3 | e^{x^2} <- (e^{x})^{x} | e^{-e^{-x}} <- \exp(-\exp(-x)) | 2^{2^n} <- 2^{(2^n)}
SECANTS:: \sec x <- \frac{1}{\cos x} | \cot x <- \frac{1}{\tan x} | \frac{\cos x}{\sin x} | \csc x <- \frac{1}{\sin x}
\sec^2 x <- 1+\tan^2 x | \csc^2 x <- 1+\cot^2 x | \frac{1}{\cos x} <- \sec x | \tan x <- \frac{1}{\cot x}
\sec x \cot x <- \csc x
DEGREES INSIDE:: \frac12 <- \sin 30^\circ | 5 <- 10\sin 30^\circ | 1 <- \tan 45^\circ | \sin 30^\circ <- \frac12 | 0.5
\frac{\sqrt3}{2} <- \cos 30^\circ | \sin 60^\circ | \cos(30^\circ) | \frac34 <- \cos^2 30^\circ | 2 <- \sec 60^\circ
\sin 40^\circ <- \cos 50^\circ | 10\sin 40^\circ <- 10\cos 50^\circ
ABBREVIATIONS:: 2 hours <- 2 hrs | 2 hr | 2 h | 4 pounds <- 4 lbs | 4 lb | 30 mph <- 30 miles per hour | 30 mi/h
30 miles per hour <- 30 mph | 5 minutes <- 5 mins | 5 min | 3 seconds <- 3 secs | 5 ohms <- 5 | 5 <- 5 ohms | 5 hrs
10 m/s <- 10 m\cdot s^{-1} | 10 m s^{-1} | 10 meters per second | 60 km/h <- 60 kph | 60 kmh | 7 years <- 7 yrs
3 kg <- 3 kgs
ZERO WIDTH:: 5 <- 5\u200b | \ufeff5 | \u200b5\u200b | x+1 <- x\u200b+\u20601 | 12 <- 1\u200d2
SIGNS:: \infty <- infinity | -\infty <- -infinity | 10 <- \binom52 | \binom{5}{2} | 2 <- \lg 100 | 5 <- \left.5\right.
2 <- \log_e e^2 | \log_{e}(e^2) | 3\ln x <- 3\log_ex
x\le 3 \vee x\ge 5 <- x\le 3 or x\ge 5 | -1 \le \sin\theta \le 1 <- -1\le\sin\theta\le1
x\le 3 \lor x\ge 5 <- x\ge5 or x\le3
LISTS:: \{\frac{259}{3}, 480000e-4, 26\} <- \{48,518/6,\text{26}\} | \{1, 48, 520\} <- \{1,48,\text{520}\}
DOMAINS:: Ce^{2x} <- Ce^{2x} \text{ for some constant } C | Ce^{2x}, C \in \mathbb{R} | Ce^{-x} for any C <- Ce^{-x}
3k+1 <- 3k+1 \text{ where } k \in \mathbb{Z} | 3k+1, k \in \mathbb{Z} | 3k+1 \quad (k\in\mathbb{Z})
f(x)=x+1 <- f(x)=x+1 \text{ for all real } x | f(x)=x+1 \ \forall x \in \mathbb{R} | f(x)=x+1, \forall x\in\mathbb R
f(x)=x+1 <- f(x) = x+1 \text{ for all } x | f(x)=x+1 \text{ for every real number } x
2n+1 <- 2n+1 \quad (n\in\mathbb{N}) | 2n+1, n \ge 0 | 2n+1 (n \geq 1) | 2n+1 \text{ for all } n
2n+1 <- 2n+1 \text{ for } n\ge 1
2n+1 <- 2n+1 \text{ with } n \in \mathbb{N} | 2n+1, \text{ where } n \text{ is a positive integer}
x^2+C <- x^2+C, \text{ where } C \text{ is a constant} | x^2+C \text{ for any constant } C | x^2+C, C\in\mathbb{R}
12 <- 12 \text{ at } x=2 | 12\ (\text{when } x=2)
3k+1, k\in\mathbb{Z} <- 3k+1 | 3k+1 \text{ where } k \in \mathbb{Z}
x = n\pi, n \in \mathbb{Z} <- x = n\pi \text{ for } n \in \mathbb{Z}
x = n\pi, n \in \mathbb{Z} <- x=n\pi | n\pi | x = \pi n, n \in \mathbb{Z} | 2^n \text{ for all } n\ge 1 <- 2^n
A\cos x+B\sin x <- A\cos x+B\sin x, \text{ where } A \text{ and } B \text{ are constants}
C_1e^x+C_2e^{-x} <- C_1e^x+C_2e^{-x}, \text{ where } C_1 \text{ and } C_2 \text{ are arbitrary constants}
Ae^x+Be^{-x} \text{ where A, B are constants} <- Ae^x+Be^{-x} | ax+b <- ax+b where a and b are real numbers
\text{all real numbers except } x=2 <- x\ne 2 | (-\infty,2)\cup(2,\infty) | \mathbb{R}\setminus\{2\}
\mathbb{R}\setminus\{0,1\} <- \text{all reals except 1 and 0}
\mathbb{R}\setminus\{0,1\} <- \text{all real numbers, except for } x = 0 \text{ and } x=1
BARS:: |x|>3 <- x<-3 \text{ or } x>3 | x>3 \lor x<-3 | |x-1|>2 <- x<-1 or x>3 | |x|\le 3 <- -3\le x\le 3
x<-3 or x>3 <- |x|>3 | -1<x<3 <- |x-1|<2 | |2x-1|\le 5 <- -2\le x\le 3 | |x|<\sqrt{2} <- -\sqrt2<x<\sqrt2
GREEK AND INDICES:: \theta <- \u03b8 | \alpha^2 <- \u03b1² | 2\alpha+\beta <- 2\u03b1+β
\sin\theta <- sinθ | \lambda_1 <- λ₁
x_1+x_{12} <- x₁+x₁₂ | 2516_8 <- 2516₈ | \log_2 5 <- log₂5 | C_1e^x <- C₁e^x | x_1^2 <- x₁²
TIMES:: 3:45 \text{ PM} <- 3:45 pm | 3:45 p.m. | 3:45PM | 9:05 a.m. <- 9:05 AM | \text{9:05 A.M.}
OPTIONS:: B <- \text{B: A larger one} | B: A large city | (B) A triangle | B. A small house | C <- C) A new world
"""
WRONG = r"""
A SUM THAT BEGINS WITH A MINUS:: -3.5 <- -3+\frac{1}{2} | -3+1/2 | -3 + 1/2 | -7/3 <- -2+1/3 | -\frac54 <- -1+\frac14
-4 <- -3+2/2 | -2.5 <- -3\frac12 | -3 1/2 | -2+1/2 | 3.5 <- 3-1/2 | -\frac{5}{2} <- -2+1/2
POWERS OF POWERS:: 4^x <- 2^{x^2} | (2^x)^3 | 2^{x+2} | e^{2x} <- (e^x)^3 | e^{x^2} | x^{2n} <- x^{n^2} | x^{n+2}
x^{2n} <- (x^2)^{n^2}
e^{2x}+1 <- (e^x+1)^2 | 8^n <- (2^n)^2 | 2^{2^n} <- (2^2)^n | 9^{x+1} <- (3^x)^2 | 5 <- 9^{9^{9^9}}
e^{e^{e^{x}}} <- e^{e^{x}}
SECANTS:: \sec x <- \frac{1}{\sin x} | \csc x | \cos x | \cot x <- \frac{\sin x}{\cos x} | \tan x | -\frac{1}{\tan x}
\sec^2 x <- 1+\cot^2 x | \sec x | \csc x <- \frac{1}{\cos x}
DEGREES INSIDE:: \frac12 <- \sin 60^\circ | \cos 30^\circ | \sin 30 | 30 | \sin 30^\circ <- 30 | \sin 30
\sin 30^\circ <- \frac{\sqrt3}{2}
5 <- 10\sin 60^\circ | 1 <- \tan 30^\circ | \sin 40^\circ <- \cos 40^\circ | \sin 50^\circ
ABBREVIATIONS:: 2 hours <- 2 mins | 2 lbs | 4 pounds <- 4 oz | 30 mph <- 30 km/h | 30 miles | 30 mi/s
10 m/s <- 10 m\cdot s
10 m/s <- 10 m s | 10 m\cdot s^{-2} | 5 ohms <- 5 volts | 3 kg <- 3 g | 30 miles per hour <- 30 kph
SIGNS:: 5 <- \not= 5 | \not=5 | \ne 5 | \infty <- -infinity | 10 <- \binom53 \cdot 2 | \binom25 | 2 <- \lg 10
2 <- \lg 1000
x\le 3 \vee x\ge 5 <- x\le 3 | x \ge 5 \vee x \le 4 | 5 <- 5\u200b5 | 12 <- 1\u200d3
NOUNS THAT MULTIPLY:: 5 <- 5 elevens | 5 twelves | 5 grands | 5 reams | 5 pentads | 5 nonets | 5 permilles | 5 grosses
5 <- 5 hexads | 5 octets | 5 gross | 5 permille | 5 grand | 5 ream
DOMAINS:: n <- n \text{ for odd } n, n+1 \text{ for even } n | 4 <- 4 \text{ if } a=1 | 4 \text{ when } a>1
4 <- 4 \text{ if } a\in\mathbb{R}
3k+1 <- 3k+2, k \in \mathbb{Z} | 3k, k\in\mathbb{Z} | 3k+1, k\in\mathbb{Z} <- 3k+1, k\in\mathbb{N}
3k+1, k\in\mathbb{Z} <- 3k+2, k\in\mathbb{Z}
3k+1, k \ge 1 <- 3k+1, k \ge 0 | x>0 <- x>0, x \in \mathbb{Z} | x > 0, x\in\mathbb{Z} <- x>0 | 12 <- 12, x=2
12 <- 13 \text{ at } x=2 | 12 \text{ at } x=2 <- 12 \text{ at } x=3 | f(x)=x+1 <- f(x)=x \text{ for all real } x
x^2+C <- x^2, \text{ where } C \text{ is a constant} | 5 <- 5, k \in \mathbb{Z} | 2n+1 <- n, 2n+1
5 <- 5 \text{ or } 7 \text{ for all } n
A\cos x <- A\cos x, \text{ where } A \text{ and } B \text{ are constants} | 5 <- 5, where A and B are constants
Ae^x+Be^{-x} <- Ae^x+Ae^{-x} where A and B are constants | Ae^x, Be^{-x} where A and B are constants
A+B <- A+B where A=1 and B=2 | 3 <- 3 or 4 where A and B are constants
C_1x+C_2 <- C_1x+C_3 where C_1, C_3 are constants
\text{all real numbers except } 2 <- \text{all real numbers} | 2 | x\ne 3 | \text{all integers except } 2
\mathbb{R} <- \text{all real numbers except 2} | x\ne 2 | \mathbb{R}\setminus\{0\} <- \text{all reals except 0 and 1}
BARS:: |x|>3 <- x>3 | x<-3 | x<3 or x>3 | x\le-3 or x\ge 3 | x<-3 or x>4 | x>3 or y<-3 | x>3 and x<-3 | |x|<3 <- x<3
x<-3 or x>3 <- |x|<3 | |y|>3 | |x|\ge 3 | |x|>3 or x=0 | -3<x<3 <- |x|\le 3 | |x|<3 or x=7
x>3 <- |x|>3 | |x|>-3 <- x>0
GREEK AND INDICES:: \alpha <- \u03b1² | a | 5 <- 5\u03b1 | \rho <- p | x_1 <- x1 | \lambda_1 <- λ₂
12 <- 12₇ | 1₂ | a_{10} <- a₁0 | x <- x₁ | 1011_2 <- 1011₃ | \log_2 5 <- log₃5
TIMES:: 3:45 PM <- 3:45 am | 3:54 pm | 4:45 p.m. | 15:45 | 3:45 pm or 4:45 pm | 3:45 meters
OPTIONS:: B <- B: A or C | B: A is right | B: A and C | B: A, C | B. A | B: A because of C | B) not A
A <- B: A larger one
LISTS:: \{1, 48520\} <- \{1,48,\text{520}\}
"""
REPLIES = [  # (gold, reply, outcome)
    # boxes side by side
    ("3, 5", r"\boxed{3} and \boxed{5}", "ok"),
    ("3, 5", r"$\boxed{3},\ \boxed{5}$", "ok"),
    ("3, 5", r"$\boxed{5}$ or $\boxed{3}$.", "ok"),
    ("3, 5, 7", r"\boxed{3}, \boxed{5}, and \boxed{7}", "ok"),
    ("3, 5", r"\boxed{3}\text{ and }\boxed{5}", "ok"),
    ("3, 5", r"\(\boxed{3}\) and \(\boxed{5}\)", "ok"),
    ("(1,2), (3,4)", r"\boxed{(1,2)} and \boxed{(3,4)}", "ok"),
    ("A, C", r"\boxed{A} and \boxed{C}", "ok"),
    ("x=3, y=5", r"\boxed{x=3}, \boxed{y=5}", "ok"),
    ("5", r"\boxed{3}, \boxed{5}", "wrong"),
    ("5", r"\boxed{3} or \boxed{5}", "wrong"),
    ("A", r"\boxed{B} and \boxed{A}", "wrong"),
    ("3, 5", r"\boxed{3}. No, it is \boxed{5}", "wrong"),
    ("3, 5", r"\boxed{3}, no: \boxed{5}", "wrong"),
    ("3, 5", r"\boxed{3}" + "\n\n" + r"\boxed{5}", "wrong"),
    ("3, 5, 7", r"\boxed{3}. \boxed{5}, \boxed{7}", "wrong"),
    ("5", r"\boxed{3}. No, it is \boxed{5}", "ok"),
    ("5, 7", r"\boxed{3}. No, \boxed{5} and \boxed{7}", "ok"),
    ("3, 5", r"$x=\boxed{3}$ or $x=\boxed{5}$", "ok"),
    ("3, 5", r"$x_1=\boxed{3}$, $x_2=\boxed{5}$", "ok"),
    ("5", r"$x=\boxed{3}$ or $x=\boxed{5}$", "wrong"),
    ("5", r"$x=\boxed{3}$, so $y=\boxed{5}$", "ok"),
    # a clause behind the answer
    ("5", "The answer is 5, though 6 works too.", "wrong"),
    ("5", "The answer is 5; but it may be $6$.", "wrong"),
    ("5", "The answer is 5, unless n is odd, then 6.", "wrong"),
    ("5", "The answer is 5, though this is unusual.", "ok"),
    ("5", "The answer is 5, because 3 + 2 = 5.", "ok"),
    # marks around the value
    ("7", "Answer: 7 ###", "ok"),
    ("7", "#### 7 ####", "ok"),
    ("7", "#### `7`", "ok"),
    ("7", "The answer is `x = 7`.", "ok"),
    ("7", "The answer is a + b = **7**.", "ok"),
    ("7", "Answer: *7*", "ok"),
    ("7", "Answer: __7__", "ok"),
    ("7", "Answer: _7_", "ok"),
    ("7", "Answer: **7** apples", "ok"),
    ("7", "## Answer\n7", "ok"),
    ("7", "**Answer**\n\n7", "ok"),
    ("7", "### Final Answer:\n\n7", "ok"),
    ("7", "**Final answer:**\n\n**7**", "ok"),
    ("7", "#### **7**", "ok"),
    ("8", "Answer: 2**3", "ok"),
    ("a*b*c", "Answer: a*b*c", "ok"),
    ("x_1", "Answer: x_1", "ok"),
    ("6", "Answer: 2**3", "wrong"),
    ("7", "Answer: 8 ###", "wrong"),
    ("7", "#### 8 ####", "wrong"),
    ("8", "## Answer\n7", "wrong"),
    ("7", "## Answers\n7", "parse_fail"),
    # a last line that states the answer comes before a box above it
    ("12", "The discriminant is \\boxed{4}.\nThe final answer is **12**.", "ok"),
    ("12", "Step 1: \\boxed{3}\n#### 12", "ok"),
    ("D", "\\boxed{B}? No.\nAnswer: D", "ok"),
    ("12", "\\boxed{4}\n\n**Answer:** 12", "ok"),
    ("12", r"\boxed{12}, since the answer is the larger one of both", "ok"),
    ("12", "\\boxed{12}\nThe answer is the larger one of both.", "ok"),
    ("12", "\\boxed{12}\nThe answer is reasonable: 12 < 20.", "ok"),
    ("12", "Answer: 4\n\\boxed{12}", "ok"),
    ("12", "\\boxed{4}\nAnswer: \\boxed{12}", "ok"),
    ("4", "The discriminant is \\boxed{4}.\nThe final answer is **12**.", "wrong"),
    ("3", "Step 1: \\boxed{3}\n#### 12", "wrong"),
    ("B", "\\boxed{B}? No.\nAnswer: D", "wrong"),
    # leftovers
    ("5", "The answer is, of course, 5.", "ok"),
    ("5", r"\boxed{\left.5\right.}", "ok"),
    ("B", "The answer is B: A large city", "ok"),
    ("A", "The answer is B: A large city", "wrong"),
    ("5", "The answer is \u200b5\u200b.", "ok"),
]


def test_right_answers():
    assert [pair for pair in cases(RIGHT) if not equal(*pair)] == []


def test_wrong_answers():
    assert [pair for pair in cases(WRONG) if equal(*pair)] == []


# Of a red team on these rules: names before boxes, clauses behind an answer, two formulas, p.m. amid a line.
REPLIES += [
    ("(2,3)", "$y = \\boxed{2}$ and $x = \\boxed{3}$", "wrong"),
    ("x=3, y=5", "$y=\\boxed{3}$, $x=\\boxed{5}$", "wrong"),
    ("(1,2)", "$x_2=\\boxed{1}$, $x_1=\\boxed{2}$", "wrong"),
    ("1,234", "$a=\\boxed{1}$, $b=\\boxed{234}$", "wrong"),
    ("(2,3)", "$x=\\boxed{2}$ and $y=\\boxed{3}$", "ok"),
    ("x=3, y=4", "$y=\\boxed{4}$ and $x=\\boxed{3}$", "ok"),
    ("18", "The answer is 18, but she has 3 left over.", "ok"),
    ("18", "The answer is 18 dollars, while Bob has 12 dollars.", "ok"),
    ("72", "The answer is 72, but note that 72 = 48 + 24.", "ok"),
    ("5", "The answer is 5, though it looks odd. Check: 2+3=5.", "ok"),
    ("5", "The answer is $5$, though 6 works too.", "wrong"),
    ("5", "The answer is $5$ or $6$.", "wrong"),
    ("5, 6", "The answer is $5$ or $6$.", "ok"),
    ("5", "The answer is \\(5\\) or \\(6\\).", "wrong"),
    ("5", "The answer is $5$, since $2+3=5$.", "ok"),
    ("5", "The answer is $5$, but note $x=6$ is extraneous.", "ok"),
    ("3:45 PM", "The answer is 3:45 p.m. or 4:45 p.m.", "wrong"),
    ("3:45 PM", "The answer is 3:45 p.m. We are done.", "ok"),
    # numbers for all n, rounded, with an estimate beside them, behind a verb
    ("14", "The answer is 14 for every n.", "ok"),
    ("14", "The answer is 14 for all positive n.", "ok"),
    ("14", "The answer is 14 for all n.", "ok"),
    ("14", "The answer is 14 for each integer n.", "ok"),
    ("14", "The answer is 14 rounded to the nearest whole number.", "ok"),
    ("3.7", "The answer is 3.7 rounded to one decimal place.", "ok"),
    ("14", "\\boxed{14 \\text{ km (about } 8.7 \\text{ miles)}}", "ok"),
    ("14", "\\boxed{14 \\text{ km (approximately } 8.7 \\text{ miles})}", "ok"),
    ("15", "We get $\\boxed{15}$; without the constraint, the number would be $30$.", "ok"),
    ("14", "Answer: Sam reads 14 books each week.", "ok"),
    ("14", "Answer: She walks 14 miles.", "ok"),
    ("3n", "The answer is 3n for all n.", "ok"),
    ("14", "**Answer:** Tom sells **14** pies.", "ok"),
    ("4", "The answer is 4 for even n.", "wrong"),
    ("4", "The answer is 4 for some n, 5 for others.", "wrong"),
    ("4", "The answer is 4 for n = 2 and 5 for n = 3.", "wrong"),
    ("14", "Answer: The value equals minus 14.", "wrong"),
    ("14", "Answer: It is less 14.", "wrong"),
    ("14", "Answer: Sam reads 15 books, 14 of them long.", "wrong"),
    ("14", "Answer: Sam reads more than 14 books.", "wrong"),
    ("15", "$\\boxed{15}$ with the constraint or $30$ without", "wrong"),
    ("30", "$\\boxed{15}$; without the constraint it would be $30$.", "wrong"),
    ("14", "Answer: Sam reads 3 times 14 books.", "wrong"),
    ("3n", "The answer is 3n+1 for all n.", "wrong"),
    ("14", "\\boxed{13 \\text{ (about } 14)}", "wrong"),
    ("-14", "Answer: It drops 14 degrees.", "wrong"),
    ("14", "Answer: It falls short of 14.", "wrong"),
    ("4", "The answer is 4 for all even n.", "wrong"),
    # an answer below a heading, displayed, in a sentence, of an option, in Chinese, corrected below its box
    ("12", "### Final Answer:\n\\[\n12\n\\]\nLet me know if you have questions.", "ok"),
    ("12", "**Answer**\n\n$$12$$", "ok"),
    ("\\frac{3}{4}", "#### **Answer**\n\n$$\n\\frac{3}{4}\n$$\n", "ok"),
    ("12", "#### Step 1: add\n5+7\n#### Step 2: conclude\nThe answer is 12.", "ok"),
    ("B", "Thus, choice B is correct.", "ok"),
    ("D", "The right choice is D because 3 > 2.", "ok"),
    ("D", "So option D is the correct answer.", "ok"),
    ("x=2, x=3", "答案是 $x=2$ 或 $x=3$。", "ok"),
    ("4", "因此，答案为：4", "ok"),
    ("D", "综上，故选D.", "ok"),
    ("2,5", "$\\boxed{2}$、$\\boxed{5}$", "ok"),
    ("30", "**Answer:** The total is **30** dollars.", "ok"),
    ("30", "Answer: She earns $30.", "ok"),
    ("30", "**Answer**: It takes **30 minutes**.", "ok"),
    ("7", "Final Answer: There are 7 such numbers.", "ok"),
    ("15", "\\boxed{14}\n\nCorrection: 14 was wrong. The answer is 15.", "ok"),
    ("14", "\\boxed{14}\nThe answer is explained above in 3 steps.", "ok"),
    ("1,3", "The answers are $1$ and $3$.", "ok"),
    (
        "\\begin{pmatrix}1\\\\2\\end{pmatrix}",
        "The answer is:\n\\[\n\\begin{pmatrix} 1 \\\\[2pt] 2 \\end{pmatrix}\n\\]",
        "ok",
    ),
    ("5", "\\[\\boxed{5}\\]\n\nAnswer: 5", "ok"),
    ("5", "costs \\$\\$5. The answer is 5.", "ok"),
    ("12", "### Final Answer\n12\nor\n13", "wrong"),
    ("12", "\\boxed{12}\n\n**Answer**\n\n\\[13\\]", "wrong"),
    ("8", "Answer: It is not 8.", "wrong"),
    ("8", "Answer: There are more than 8.", "wrong"),
    ("8", "Answer: The number is less than **8**.", "wrong"),
    ("B", "Option B is not correct.", "parse_fail"),
    ("B", "Option B is correct only if x > 0. The answer is C.", "wrong"),
    ("7", "答案是 7 或 8", "wrong"),
    ("7", "答案：7，也可能是9", "wrong"),
    ("8", "Answer: The sum isn't **8**.", "wrong"),
    ("3", "Answer: The value of x^3 is 8.", "wrong"),
    ("5", "Answer: The answer is never 5", "wrong"),
    ("8", "Answer: It is 8 or 9.", "wrong"),
    ("2", "Answer: There are 2 or 3 ways.", "wrong"),
]


@pytest.mark.parametrize(("gold", "reply", "outcome"), REPLIES)
def test_replies(gold, reply, outcome):
    found = grade({"answer": gold, "reply": reply, "strict": False})
    assert found["outcome"] == outcome, found


def test_a_box_decides_in_strict_mode_as_little_as_before():
    for reply, outcome in (
        ("\\boxed{5}\nAnswer: 4", "wrong"),
        ("\\boxed{4}\nAnswer: 5", "ok"),
        (r"\boxed{5}", "parse_fail"),
    ):
        assert grade({"answer": "5", "reply": reply, "strict": True})["outcome"] == outcome


def test_golds_in_boxes_side_by_side():
    assert gold_answer(r"so \boxed{3} and \boxed{5}") == "3, 5" and extract(r"\boxed{3} and \boxed{5}") == "3, 5"


def vanishing(seed):
    """A polynomial that is 0 at the points that a grader of long ago compared at, and forms with it."""
    rng = random.Random(seed)
    points = [(7919 * scale, 10007 + shift) for scale, shift in ((1, 0), (-3, 0), (100, 0), (-101, 0))]
    factors = "".join(f"({below}x-({above}))" for above, below in points)
    gold = rng.choice(["x^2", "x+1", r"\sin x", "2x", r"\frac{1}{x}"])
    return [
        (gold, f"{gold}+{factors}"),
        (gold, rf"{gold}+\sqrt{{x}}{factors}"),
        (gold, f"{gold}+{rng.randint(2, 9)}{factors}"),
    ]


def test_no_polynomial_vanishes_at_the_points_of_comparison():
    made = [pair for seed in range(7) for pair in vanishing(seed)]
    assert [pair for pair in made if equal(*pair)] == []


def nested(form, depth, inner="x"):
    for _ in range(depth):
        inner = form.replace("#", inner)
    return inner


HOSTILE_LINES = [
    "**a ",
    "__a ",
    "*a ",
    "_a ",
    "# ",
    "#x",
    "####x ",
    "#" * 999 + " x",
    r"\boxed{1}, ",
    r"\boxed{1} ",
    "=**",
]
HOSTILE_LINES += ["answer: ", "## answer\n", "x \\in ", "for all ", "A (", "A ", "` "]


@pytest.mark.parametrize("text", HOSTILE_LINES)
def test_long_lines_are_read_in_time(text):
    start = time.process_time()
    for before in ("Answer: ", "#### ", "\\boxed{4}\nAnswer: ", ""):
        grade({"answer": "5", "reply": before + text * (150_000 // len(text)), "strict": False})
        grade({"answer": "5", "reply": before + text * (1_900 // len(text)), "strict": False})
    assert time.process_time() - start < 4


DEEP = [
    r"\sin(#)",
    r"1+\frac{1}{#}",
    r"x_{#}",
    r"\sqrt{1+#}",
    r"2^{#}",
    "(#)",
    "{#}",
    r"\ln(1+#)",
    r"\frac{#}{2}",
    "|#+1|",
]
DETERMINANT = r"\\".join("&".join(f"x^{i * j + 1}" for j in range(8)) for i in range(8))


@pytest.mark.parametrize("depth", [8, 12, 40])
def test_deep_formulas_end_in_time(depth):
    equal("x", "x+1")  # imports sympy
    for text in [*(nested(form, depth) for form in DEEP), rf"\begin{{vmatrix}}{DETERMINANT}\end{{vmatrix}}"]:
        start = time.process_time()
        assert not equal("7", text)
        assert time.process_time() - start < 2, text


def judged(kind, gold, answer):
    if kind == "reply":
        return grade({"answer": gold, "reply": answer, "strict": False})["outcome"] == "ok"
    return equal(gold, answer)


def mistaken(count, seed, verdict):
    """Of so many generated pairs that have this verdict those that are judged otherwise."""
    made = (pair for pair in pairs(10**6, seed=seed, kinds=(reports,)) if pair[3] == verdict)
    return [pair for pair in itertools.islice(made, count) if judged(*pair[:3]) != verdict]


@pytest.mark.parametrize("count", [200, pytest.param(1200, marks=pytest.mark.long)])
def test_near_misses_are_refused(count):
    assert mistaken(count, 48, False) == []


@pytest.mark.parametrize("count", [200, pytest.param(3000, marks=pytest.mark.long)])
def test_right_pairs_of_the_same_kinds_are_accepted(count):
    assert mistaken(count, 49, True) == []
