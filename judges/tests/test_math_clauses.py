# ruff: noqa: RUF001
r"""What a line says behind its value: another value that it offers, which makes the answer a list, or a remark.

A line of a table is `gold <- answer | answer`, as in test_hostile_math.py; each stands behind `The answer is`, and so
that a box, marks and a last line are tried, in other forms.
"""

import pytest
from test_hostile_math import cases

from judges.math import grade

HEDGES = r"""
OR:: 5 <- 5 or 6 | 6 or 5 | either 5 or 6 | 5 (or 6) | 5, or 6 | 5, or maybe 6 | 5, possibly 6 | 5; perhaps 6
5 <- 5. Alternatively, 6 | 5, alternatively 6 | 5, or else 6 | 5 or, alternatively, 6 | 5, or about 6 | 5, if not 6
5 <- 5 - or 6 | 5. Or 6 | 5, or 6 dollars | 5, or six | 5 or $6$ | $5$ or $6$ | $5$ (or $6$) | \(5\) or \(6\) | 5 / 6
5 <- 5 if n is even, otherwise 6 | $5$, otherwise $6$ | 5, if n is even, 6 if n is odd | $5$ if n is even, else $6$
AND:: 5 <- 5 and 6 | 5, and also 6 | 5 and also 6 | $5$, $6$ | $5$ and $6$ | 5, 6 | 5; 6 | $5$; also $6$
5 <- 5 as well as 6
5 <- 5, as well as 6 | 5, plus 6 | 5 and maybe 6 | 5, and x = 6 works | 5, and, if n is odd, 6 | 5, and even 6
BUT:: 5 <- 5, but 6 works too | 5, however 6 works | 5, however, 6 works too | 5 but 6 is possible | 5, though 6 works
5 <- 5, though x = 6 works | 5, yet 6 is also right | 5, while 6 is acceptable | 5. But 6 is also possible
5 <- 5, although it may be 6 | 5, but it could also be $6$ | $5$, but $6$ works | $5$ but it might be $6$ | 5, but 6
5 <- 5, though some would say 6 | 5, but one could argue 6 | 5, and another solution is 6 | 5, with 6 also possible
5 <- 5, but 6 dollars works too | 5, although 6 satisfies it | 5 -- though 6 fits | 5, which is prime, and 6 works too
5 <- 5, unless n is odd, then 6 | 5, but 6 is not impossible | 5, though 6 isn't wrong | 5 (6 also works) | 5 (also 6)
5 <- not 5 but 6 | 5, because 2+3=5, but 6 works too | 5, since 2+3=5, although it could also be 6 | 6, not 5
5 <- 5, or 6 if n is odd | **5** or **6** | **5**, or **6** | **5**, but **6** works | **5** (or **6**)
FORMULAS:: x+1 <- x+1, or x-1 | $x+1$ or $x-1$ | $x+1$, though $x-1$ works | x+1, but x+2 also works | $x+1$, $x-1$
\frac{1}{2} <- \frac{1}{2}, or \frac{1}{3} | $\frac12$ or $\frac13$ | 1/2, though 1/3 is possible | 0.5, maybe 0.6
\sqrt{2} <- \sqrt{2}, but also -\sqrt{2} | $\sqrt2$, and also $-\sqrt2$ | (1,2) <- (1,2), or (2,1) | $(1,2)$ and $(2,1)$
OPTIONS:: B <- B or C | B, or C | B, but C is close | B, but C is also right | B (or C) | B, though C works | B. Or C
B <- B and C
B <- B, maybe C | (B), but (C) is also right | B, however C fits too | option B, but option C is also right | B/C
B <- B; C is also right | **B**, though **C** is possible | B, and also C | B. But C could also be right
WORDS:: yes <- yes, or no | yes or no | Alice <- Alice or Bob | Alice, or Bob | Alice, maybe Bob | even <- even, or odd
"""
REMARKS = r"""
REASONS:: 5 <- 5, because 2+3=5 | 5 because 2+3=5 | 5, since 2+3=5 | 5 (since 2+3=5) | 5, as 2+3=5 | 5 as 10/2=5
5 <- 5, which is prime | 5, so 6 is too many | 5, where x > 0 | 5, that is, 5.0 | 5, i.e. 10/2 | 5, since 6 is even
5 <- 5, since x = 2 or x = 3 and 2+3=5 | 5, because 2 is prime, 3 is prime, and 2+3=5 | 5, which is 2 more than 3
5 <- 5 since 2 is prime but 4 is not | $5$, since $2+3=5$ | $5$ because $6$ is too large | $5$, where $x=2$
5 <- \(5\), so $x=6$
5 <- 5, so we are done | 5, and we are done | 5 and we are done | 5; this follows from 2+3
5 <- 5, by the formula with n = 4
5 <- 5, if we count 0 | 5, given that x = 2 | 5, for x = 2 | 5, using 2+3 | 5, found by adding 2 and 3 | 5, with x = 2
5 <- 5, as required. | 5, as 6 is even and 4 is even | 5 (from 2 + 3) | 5 (see step 2) | 5. We check: 2+3=5.
5 <- 5. Check: 10-5=5
RESTATED:: 1/2 <- 1/2, that is, 0.5 | 1/2, or 0.5 | 1/2 or 0.5 | 1/2, i.e. 0.5 | 1/2, or equivalently 0.5
1/2 <- $\frac12$ or $0.5$
1/2 <- $\frac{1}{2}$, i.e. $0.5$ | 1/2 (or 0.5) | 1/2 = 0.5 | 0.5, which is 1/2 | 1/2 (that is, 0.5) | 0.5, or 50\%
\pi <- $\pi$, or about 3.14 | $\pi$ (about 3.14) | $\pi$, or approximately $3.14$ | $\pi$, which is about 3.14
2\sqrt{2} <- $2\sqrt2$, or $\sqrt8$ | $\sqrt{8}$, which is $2\sqrt{2}$ | $2\sqrt{2}$, or roughly 2.83
STORY:: 18 <- 18, but she has 3 left over | 18 dollars, while Bob has 12 dollars | 18, though this took a while
18 <- 18, leaving 3 apples | 18, and she has 3 left | 18, but note that 18 = 15 + 3 | 18, though 3 of them are broken
18 <- 18 dollars, and Bob has 12 dollars | 18, and 18 is even | $18$, giving a total of $36$
18 <- 18 eggs, although 3 were eaten
18 <- $18, which is $5 more than Bob | $18 and she keeps $5 | \$18, because \$9 + \$9 = \$18 | $18$ dollars
18 <- $18$ for 3 days
18 <- 18 miles, while the other path is 20 miles long | 18, with 3 left over | 18, where 3 are red and 15 are blue
NOT:: 5 <- 5, not 6 | 5 and not 6 | 5, but not 6 | 5, rather than 6 | 5, though 6 does not work
5 <- 5, but -2 is extraneous
5 <- 5, but x = -1 is rejected | 5, while 6 is too large | $5$, but note $x=6$ is extraneous
B <- B, since A and C are wrong | B, while A, C and D are wrong | B, not C | B, which is 5 | B because C is even
B <- B, as C is 6
B <- (B) because 2+3=5 | B. C is wrong | B, but C is not | B: 12 | option B, since option C is odd
BOLD:: 18 <- **18**, as required. | **18**, which is even | **18** dollars | **$18$**, which is even
18 <- **18 dollars**. | **18**
18 <- **18** because 9+9=18 | **$18**, so we are done | **18**; done | **18** (eighteen) | *18*, as said
18 <- 9 + 9 = **18**, as required | **\$18**, since 9+9=18 | **x = 18**, as required | $\mathbf{18}$, as required
18 <- __18__, so
B <- **B**, since C is odd | **(B)**, as required | **B.** C is odd | 3:45 PM <- **3:45 PM**, as required
3:45 PM <- 3:45 p.m., so
LISTS:: 5, 6 <- 5 and 6 | $5$ and $6$ | $5$, $6$ | $5$ or $6$ | either 5 or 6 | both 5 and 6 | 5 or 6, which differ
5, 6 <- **5** and **6**
5, 6 <- $x = 5$ and $x = 6$ | x = 5 or x = 6, as required | $x=5$, $x=6$ | 5, and also 6 | 1,234 <- 1,234, as required
3k+1 <- $3k+1$, where $k$ is an integer | $3k+1$, $k \in \mathbb{Z}$ | 3k+1, where k is 0, 1 or 2 | $3k+1$ for $k \ge 1$
(1,2) <- $(1,2)$, since $1+2=3$ | (1,2), which lies on y = 2x | x=3, y=5 <- $x=3$ and $y=5$
x=3, y=5 <- x = 3 and y = 5, as required
"""
BOXES = [  # what stands around the last box
    ("5", r"\boxed{5} or 6", "wrong"),
    ("5", r"$\boxed{5}$ or $6$.", "wrong"),
    ("5", r"$\boxed{5}$ (or $6$)", "wrong"),
    ("5", r"\boxed{5}, and also 6", "wrong"),
    ("5", r"\boxed{5}, but 6 works too", "wrong"),
    ("5", r"$\boxed{5}$, though it could also be $6$.", "wrong"),
    ("B", r"\boxed{B}, but C is also right", "wrong"),
    ("5", r"6 or \boxed{5}", "wrong"),
    ("5", r"So it is $6$, or $\boxed{5}$.", "wrong"),
    ("5", r"\boxed{5}\text{ or }6", "wrong"),
    ("5", r"\boxed{5}, since 2+3=5", "ok"),
    ("5", r"so \boxed{5} because 6 is too large", "ok"),
    ("5", r"$x = \boxed{5}$ and we check $2+3=5$", "ok"),
    ("5", r"so $a=\boxed{5}$ and $b=3$", "ok"),
    ("5", r"\boxed{5} dollars, and she has 3 left", "ok"),
    ("5", r"\boxed{5} and not 6", "ok"),
    ("1/2", r"\boxed{\frac12}, or 0.5", "ok"),
    ("5", r"for $n = 2$ or $n = 3$: \boxed{5}", "ok"),
    ("5", r"\boxed{5}. We are done: 6 is even.", "ok"),
    ("5", "\\boxed{7}\nThe answer is **5**, as required.", "ok"),
    ("5", "\\boxed{7}\nThe answer is **5**, but 6 works too.", "wrong"),
    ("5", "\\boxed{5}\nThe answer is 5 or 6.", "wrong"),
    ("5", "The answer is 5 or the answer is 6.", "wrong"),
    ("6", "The answer is 5 or the answer is 6.", "wrong"),
    ("6", "The answer is 5. No, the answer is 6.", "ok"),
]

# Of an engineer who had not seen the rules, at three commits.
UNSEEN = [
    ("5", "The answer is 5, but it could also be 6.", "wrong"),
    ("12", "The final answer is $12$, $13$.", "wrong"),
    ("8", "The answer is $8$; $9$.", "wrong"),
    ("8", "The answer is $8$, $9$ or $10$.", "wrong"),
    ("8", "Answer: $8$, $9$", "wrong"),
    ("8", "\\boxed{8}, or $9$.", "wrong"),
    ("5", "The answer is 5, and possibly also 7.", "wrong"),
    ("5", "Answer: 5; if repeats are allowed, 6", "wrong"),
    ("12", "The answer is 12, assuming distinct balls; 15 assuming identical balls.", "wrong"),
    ("12", "So the answer is 15 or \\boxed{12}.", "wrong"),
    ("12", "The answer is \\boxed{12} or maybe 15", "wrong"),
    ("8", "The answer is 8, but if we count both ends it is 9.", "wrong"),
    ("8", "The answer is 8. It could also be 9.", "wrong"),
    ("8", "The answer is $8$ (or $9$).", "wrong"),
    ("8", "The answer is $8$ to $9$.", "wrong"),
    ("8", "The answer is $8$ + $9$.", "wrong"),
    ("8", "Answer: 8\nor\n9", "wrong"),
    ("8", "\\boxed{8} (alternatively, 9)", "wrong"),
    ("8", "\\boxed{8}. Or 9.", "wrong"),
    ("8", "Either \\boxed{8} or 9.", "wrong"),
    ("8", "$$\\boxed{8} \\quad \\text{or} \\quad 9$$", "wrong"),
    ("1/2", "The answer is $\\frac{1}{2}$, or equivalently $0.5$.", "ok"),
    ("8", "The correct answer is **8**, not 9.", "ok"),
    ("5", "The final answer is 5 rather than 6.", "ok"),
    ("12", "Therefore, the answer is 12 — a nice even number.", "ok"),
    ("1/2", "The answer is 1/2, i.e. 0.25.", "wrong"),
    ("8", "The answer is 8 (= 2^3).", "ok"),
    ("8", "The answer is 8 (nearest whole number).", "ok"),
    ("8", "The answer is 8 (apples).", "ok"),
    ("8", "The answer is 8 when rounded to the nearest integer.", "ok"),
    ("8", "The answer is 8 each.", "ok"),
    ("8", "The answer is 8 and not 9.", "ok"),
    ("8", "The answer is **8**!", "ok"),
    ("8", "Answer: 8 (3 + 5)", "ok"),
    ("8", "Answer: There are 8 apples.", "ok"),
    ("8", "Answer: It takes 8 hours.", "ok"),
    ("8", "**Answer:** The minimum value is $8$.", "ok"),
    ("7", "The answer is **7**, as required.", "ok"),
    ("7", "The answer is **7**: there are no others.", "ok"),
    ("C", "The answer is **C**, because the others are too small.", "ok"),
    ("9", "The answer is **9**; no other number works.", "ok"),
    ("9", "The answer is **9 apples**, because 3 × 3 = 9.", "ok"),
    ("9", "The answer is **x = 9**, because x > 0.", "ok"),
    ("9", "Answer: **9**, as desired.", "ok"),
    ("9", "**The answer is 9**, as desired.", "ok"),
    ("\\frac{1}{9}", "The answer is **1/9**, as desired.", "ok"),
    ("9\\%", "The answer is **9%**, as desired.", "ok"),
    ("Friday", "The answer is **Friday**, as desired.", "ok"),
    ("D", "The answer is **(D)**, because 3 × 3 = 9.", "ok"),
    ("2, 3", "**Answer:** **x = 2**, **x = 3**", "ok"),
    ("x+1", "The answer is **x + 1**, for all x.", "ok"),
    ("9", "The answer is **9** (apples).", "ok"),
    ("B", "The correct option is B.", "ok"),
    ("B", "The correct option is B, since 3 × 4 = 12.", "ok"),
    ("B", "Correct option: B", "ok"),
    ("B", "Therefore, (B) is the correct answer.", "ok"),
    ("B", "The correct choice is **B**.", "ok"),
    ("B", "The answer is B, but C is also correct.", "wrong"),
    ("B", "The answer is B. Or C.", "wrong"),
    ("B", "The correct option is (B).", "ok"),
    ("B", "The answer is B (12).", "ok"),
    ("B", "The answer is B - 12.", "ok"),
    ("B", "The answer is B, however D is also acceptable.", "wrong"),
    ("B", "The answer is B. Alternatively, C.", "wrong"),
    ("B", "\\boxed{B} (or C)", "wrong"),
    ("x+1", "Answer: $x+1$; $x+2$", "wrong"),
    ("x=3", "\\boxed{x=3} and also $x = 4$.", "wrong"),
    ("x+1", "The answer is $x+1$, or equivalently $1+x$.", "ok"),
    ("x+1", "The answer is $x+1$ (or $x-1$).", "wrong"),
    ("12", "\\boxed{12} or 15", "wrong"),
    ("12", "$\\boxed{12}$, $15$", "wrong"),
    ("12", "\\boxed{12}\n\nWait, I made a mistake. The answer is 15.", "wrong"),
    ("x_1=3, x_2=4", "The answer is x₁ = 3 and x₂ = 4.", "ok"),
    ("\\lambda_1=2, \\lambda_2=5", "The answer is λ₁ = 2, λ₂ = 5.", "ok"),
    ("x_1=1, x_2=2, x_3=3", "\\boxed{x_{1}=1, x_{2}=2, x_{3}=3}", "ok"),
    ("x_1=1", "\\boxed{x_{1}=1}", "ok"),
    ("a_1=1, a_2=3", "The answer is a₁ = 1 and a₂ = 3.", "ok"),
    ("\\alpha=1, \\beta=2", "The answer is $\\alpha = 1$ and $\\beta = 2$.", "ok"),
    ("\\lambda_1=-1, \\lambda_2=3", "The answer is $\\lambda_{1} = -1$ and $\\lambda_{2} = 3$.", "ok"),
    ("\\lambda_1=-1, \\lambda_2=3", "$\\lambda_1 = \\boxed{-1}$ and $\\lambda_2 = \\boxed{3}$", "ok"),
    ("\\omega_0=\\sqrt{\\frac{k}{m}}", "The answer is ω₀ = √(k/m).", "ok"),
    ("2, 3", "The answer is $2$ and $3$.", "ok"),
    ("2, 3", "The solutions are $x = 2$ and $x = 3$.", "ok"),
    ("3:45 \\text{ PM}", "\\boxed{3{:}45\\text{ PM}}", "ok"),
    ("(-\\infty,-1)\\cup(-1,1)\\cup(1,\\infty)", "\\boxed{x \\ne -1 \\text{ and } x \\ne 1}", "ok"),
    ("3k+1", "The answer is 3k + 1 for integers k.", "ok"),
    ("1234567", "\\boxed{1,\\!234,\\!567}", "ok"),
    ("Alice", "The answer is **Alice**, because she has 12 apples.", "ok"),
    ("\\text{ellipse}", "The answer is an ellipse.", "ok"),
    ("42", "### **Final Answer**\n\n42 apples", "ok"),
    ("42", "**Final Answer**:\n$$\n42\n$$", "ok"),
    ("42", "\\boxed{42}\n\n## Answer\n$43$", "wrong"),
    ("9", "**Final Answer:**\n\n$$\n9\n$$", "ok"),
    ("9", "**Answer:**\n\n$$\nx = 9\n$$", "ok"),
    ("9", "### Answer:\n$$\n9\n$$", "ok"),
    ("9", "#### Answer:\n\n**9**", "ok"),
    ("9", "The answer is\n\n\\[\n9.\n\\]", "ok"),
    (
        "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
        "The answer is\n\n$$\n\\begin{pmatrix}\n1 & 2 \\\\\n3 & 4\n\\end{pmatrix}\n$$",
        "ok",
    ),
    ("9", "\\boxed{9}\n\n**Final Answer**\n$$\n10\n$$", "wrong"),
    ("9", "\\boxed{9}\n\n### Answer\n\n10", "wrong"),
    ("42", "### Final Answer\n\n42\n\nor\n\n43", "wrong"),
    ("9", "### Final Answer\n\n$9$ or\n$10$", "wrong"),
    ("5", "所以答案是 **5**。", "ok"),
    ("B", "故选 B。", "ok"),
    ("2,3", "\\boxed{2} 和 \\boxed{3}", "ok"),
    ("5", "答案是 5，也可能是 6。", "wrong"),
    ("C", "故选：C.", "ok"),
    ("C", "故选C。", "ok"),
    ("1, 2", "答案是 $x=1$ 或 $x=2$。", "ok"),
    ("1, 2", "$x=\\boxed{1}$ 或 $x=\\boxed{2}$", "ok"),
    ("7", "$\\boxed{7}$ 或 $8$", "wrong"),
    ("5", "答：5", "ok"),
    ("C", "答案是选项C。", "ok"),
    ("18", "**Answer:** Janet makes **$18** every day at the farmers' market.", "ok"),
    ("1,\\!234", "\\boxed{1234}", "ok"),
    ("11,\\!111,\\!111,\\!100", "\\boxed{11111111100}", "ok"),
    ("2598960", "\\boxed{2,\\!598,\\!960}", "ok"),
    ("\\$36,\\!000", "\\boxed{\\$36,000}", "ok"),
    ("5", "The answer is 5 rather than 6, or the other way around.", "wrong"),
    ("12", "The final answer is 12, no wait, 15.", "wrong"),
    ("8", "The final answer is 8 apples, although 9 apples is arguable.", "wrong"),
    ("8", "$$9 \\quad \\text{or} \\quad \\boxed{8}$$", "wrong"),
    ("8", "The answer is $8$ $9$.", "wrong"),
    ("1/2", "\\boxed{0.5 \\text{ (or } \\tfrac12)}", "ok"),
    ("8", "$\\boxed{8}$, i.e. eight.", "ok"),
    ("12", "Hence the answer to the question is 12.", "ok"),
    ("8", "The answer is 8 after rounding.", "ok"),
    ("8", "The answer is 8: 3 + 5 = 8.", "ok"),
    ("5", "The answer is indeed 5.", "ok"),
    ("12", "Therefore, the answer is 12 ✅", "ok"),
    ("8", "The answer is also 8.", "ok"),
    ("8", "The answer is still 8.", "ok"),
    ("8", "The answer is clearly 8.", "ok"),
    ("8", "The answer is always 8.", "ok"),
    ("8", "The answer is actually 8.", "ok"),
    ("8", "The answer is 8 🎉", "ok"),
    ("8", "The answer is 8 ✓", "ok"),
    ("8", "The answer is 8 - done.", "ok"),
    ("8", "The answer is 8 – as we wanted.", "ok"),
    ("8", "Answer: x = 8 ✓", "ok"),
    ("8", "Answer: 8 ✅", "ok"),
    ("7", "<b>Answer: 7</b>", "ok"),
    ("7", "The answer is <b>7</b>.", "ok"),
    ("I", "The answer is I and II.", "wrong"),
    ("B", "The answer is B (12) or C (13).", "wrong"),
    ("B", "The answer is B – 12.", "ok"),
    ("B", "The answer is B, 12.", "ok"),
    ("B", "The answer is B. C is also correct.", "wrong"),
    ("B", "Either C or \\boxed{B}", "wrong"),
    ("12", "-\\boxed{12}", "wrong"),
    ("12", "\\boxed{12} \\cdot 10^3", "wrong"),
    ("\\lambda_1=2, \\lambda_2=5", "\\boxed{\\lambda = 2, 5}", "ok"),
    ("2, 3", "\\boxed{2 < x < 3}", "wrong"),
    ("\\sqrt[3]{16}", "The answer is ∛16.", "ok"),
    ("\\text{ellipse}", "\\boxed{\\text{an ellipse}}", "ok"),
    ("204", "Therefore, the total time is $\\boxed{204}$ minutes, or 3 hours and 24 minutes.", "ok"),
    ("2\\sqrt{3}", "The answer is $2\\sqrt{3} \\approx 3.46$.", "ok"),
    ("\\frac{3\\sqrt{3}}{4}", "The answer is (3 sqrt(3))/4.", "ok"),
    ("6", "\\boxed{6 \\text{ (apples)}}", "ok"),
    ("4", "Hence $\\boxed{4}$ is the answer, and $3$ is the number of odd ones.", "ok"),
    ("4", "$\\boxed{4}$ (attained at $a=1$ or $a=3$).", "ok"),
    ("4", "The maximum is $\\boxed{4}$, attained at $x=1$ or $x=-1$.", "ok"),
    ("4", "The answer is 4, where either x = 1 or x = -1.", "ok"),
    ("4", "The answer is $4$, since $x = 3$ or $x = 5$ would be odd.", "ok"),
    ("4", "The answer is $4$ cm or $0.04$ m.", "ok"),
    ("4", "The answer is $4$ if $n$ is even and $3$ if $n$ is odd.", "wrong"),
    ("4", "The answer is $4$ for even $n$ and $3$ for odd $n$.", "wrong"),
    ("4", "The answer is $4$ times $3$.", "wrong"),
    ("4", "The answer is $4$ hours and $30$ minutes.", "wrong"),
    ("4", "The answer is $4$ feet $3$ inches.", "wrong"),
    ("4", "The answer is $4$ \\cdot $3$.", "wrong"),
    ("4", "Answer: $4$ hours and $30$ minutes", "wrong"),
    ("x_{1}=2, x_{2}=3", "\\boxed{x=2 \\text{ or } x=3}", "ok"),
    ("\\vec{v} = (1,2)", "\\boxed{(1,2)}", "ok"),
    ("\\overrightarrow{AB}=(1,2)", "\\boxed{(1, 2)}", "ok"),
    ("30^{\\circ}, 60^{\\circ}, 90^{\\circ}", "\\boxed{30, 60, 90}", "ok"),
    ("12", "\\boxed{\\text{Total cost} = \\$12}", "ok"),
    ("12", "\\boxed{12,}", "ok"),
    ("12", "\\boxed{12;}", "ok"),
    ("12", "\\framebox{12}", "ok"),
    ("12", "\\boxed{12 \\tag{1}}", "ok"),
    ("12", "\\boxed{12 \\quad \\checkmark}", "ok"),
    ("21", "$\\boxed{21}$ — if order mattered, it would be 42.", "ok"),
    ("21", "The answer is \\boxed{21}, although at first sight one may think of 42.", "ok"),
    ("\\frac{1}{4}", "The probability is $\\boxed{\\frac{1}{4}}$, or 1 in 4.", "ok"),
    ("\\frac{1}{4}", "The probability is $\\boxed{\\frac{1}{4}}$ or 25 percent.", "ok"),
    ("\\frac{1}{4}", "The probability is $0.25$ or $\\boxed{\\frac{1}{4}}$.", "ok"),
    ("\\frac{1}{4}", "The probability is \\boxed{0.25} or \\boxed{\\frac{1}{4}}.", "ok"),
    ("90", "The trip takes \\boxed{90} minutes, or 1.5 hours.", "ok"),
    ("90", "The trip takes \\boxed{90} minutes, or 1 hour and 30 minutes.", "ok"),
    ("90", "The angle is \\boxed{90} degrees, or $\\frac{\\pi}{2}$ radians.", "ok"),
    ("90", "The angle is \\boxed{90^\\circ} or $\\pi/2$ radians.", "ok"),
    ("B", "The answer is B, although A looks right at first.", "ok"),
    ("x^2+1", "The answer is $x^2+1$, where $x$ is $1$ or $2$.", "ok"),
    ("\\sqrt{2}", "The answer is $\\boxed{\\sqrt{2}} \\approx 1.414$ cm or 14.14 mm.", "ok"),
    ("18", "**Answer:** Janet makes 18 dollars every day.", "ok"),
    ("8", "The answer is 8 (3 + 5).", "ok"),
    ("9", "The answer is **9**!", "ok"),
    ("9", "The answer is **9**—done.", "ok"),
    ("D", "The answer is **D** (9).", "ok"),
    ("1234", "\\boxed{1,\\!234}", "ok"),
    ("2,\\!598,\\!960", "\\boxed{2598960}", "ok"),
    ("\\$36,\\!000", "\\boxed{36000}", "ok"),
]


def outcome_of(gold, reply):
    return grade({"answer": gold, "reply": reply, "strict": False})["outcome"]


def test_another_value_that_is_offered_makes_a_list():
    assert [pair for pair in cases(HEDGES) if outcome_of(pair[0], f"The answer is {pair[1]}") == "ok"] == []


def test_a_remark_behind_the_value_is_none():
    assert [pair for pair in cases(REMARKS) if outcome_of(pair[0], f"The answer is {pair[1]}") != "ok"] == []


@pytest.mark.parametrize(("gold", "reply", "outcome"), BOXES + UNSEEN)
def test_replies(gold, reply, outcome):
    assert outcome_of(gold, reply) == outcome
