package peer

import (
	"fmt"
	"strconv"
	"strings"
)

// Worthless maps an identity, "role/name", to the lowest valid admission: certificates of
// earlier admissions are void.
type Worthless map[string]uint64

// everyAdmission is above all admissions.
const everyAdmission = 1 << 32

// WorthlessBelow returns the list entry by which certificates of admissions below n are refused:
// "role/name<3". An entry without an admission, "role/name", refuses all certificates of the
// identity.
func WorthlessBelow(who string, n uint32) string { return fmt.Sprintf("%s<%d", who, n) }

// ParseWorthless parses a list. malformed are the entries without a readable admission, as of a
// newer program: such an entry refuses all certificates of its identity, since it was written
// to refuse some.
func ParseWorthless(list []string) (r Worthless, malformed []string) {
	r = Worthless{}
	for _, x := range list {
		who, below, some := strings.Cut(x, "<")
		n, err := strconv.ParseUint(below, 10, 32)
		switch {
		case !some:
			r[x] = everyAdmission
		case err == nil:
			r[who] = max(r[who], n)
		default:
			r[who] = everyAdmission
			malformed = append(malformed, x)
		}
	}
	return r, malformed
}

// Has reports whether the list refuses an identity's certificate; false without a certificate.
func (r Worthless) Has(i Identity) bool {
	return i.Role != "" && uint64(i.Admission) < r[i.String()]
}
