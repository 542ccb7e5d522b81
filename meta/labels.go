package meta

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Labels of a volume are keys and values for finding volumes. Keys, values and selectors have
// the syntax of Kubernetes.
const (
	// MaxLabels is how many labels a volume has at most.
	MaxLabels = 64
	// MaxLabelBytes bounds all keys and values of a volume together, so that a page of volumes
	// fits into an answer.
	MaxLabelBytes = 8 << 10
	// MaxLabel bounds a value, and a key's part behind the slash, in bytes.
	MaxLabel = 63
	// MaxLabelPrefix bounds a key's part in front of the slash, in bytes.
	MaxLabelPrefix = 253
)

// CheckLabelKey checks the syntax of a key: NAME or PREFIX/NAME. NAME has letters, digits,
// '-', '_' and '.', and begins and ends with a letter or a digit. PREFIX is a DNS name in
// lower case. Errors: Invalid.
func CheckLabelKey(key string) error {
	prefix, name, has := strings.Cut(key, "/")
	if !has {
		prefix, name = "", key
	}
	if has && !isDNSName(prefix) || !isLabelWord(name) {
		return E("check label", Invalid, key, fmt.Errorf("a key is NAME or DNS-NAME/NAME, in which NAME has 1 to %d letters, digits, '-', '_' and '.', and a letter or a digit at each end", MaxLabel))
	}
	return nil
}

// CheckLabelValue checks the syntax of a value: empty, or the syntax of a key's NAME. Errors:
// Invalid.
func CheckLabelValue(value string) error {
	if value != "" && !isLabelWord(value) {
		return E("check label", Invalid, value, fmt.Errorf("a value has up to %d letters, digits, '-', '_' and '.', and a letter or a digit at each end", MaxLabel))
	}
	return nil
}

func isAlnum(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
}

func isLabelWord(s string) bool {
	if s == "" || len(s) > MaxLabel || !isAlnum(s[0]) || !isAlnum(s[len(s)-1]) {
		return false
	}
	for i := range len(s) {
		if c := s[i]; !isAlnum(c) && c != '-' && c != '_' && c != '.' {
			return false
		}
	}
	return true
}

func isDNSName(s string) bool {
	if len(s) > MaxLabelPrefix {
		return false
	}
	for part := range strings.SplitSeq(s, ".") {
		if !isLabelWord(part) || part != strings.ToLower(part) || strings.Contains(part, "_") {
			return false
		}
	}
	return true
}

// CheckLabels checks a change of labels; a nil value removes a label. Errors: Invalid,
// ResourceExceeded.
func CheckLabels(change map[string]*string) error {
	set := map[string]string{}
	for _, k := range slices.Sorted(maps.Keys(change)) {
		if err := CheckLabelKey(k); err != nil {
			return err
		}
		if v := change[k]; v != nil {
			set[k] = *v
			if err := CheckLabelValue(*v); err != nil {
				return err
			}
		}
	}
	return checkLabelRoom(set)
}

func checkLabelRoom(labels map[string]string) error {
	const op = "check labels"
	if n := len(labels); n > MaxLabels {
		return E(op, ResourceExceeded, "", fmt.Errorf("%d labels: a volume has at most %d", n, MaxLabels))
	}
	bytes := 0
	for k, v := range labels { // in any order
		bytes += len(k) + len(v)
	}
	if bytes > MaxLabelBytes {
		return E(op, ResourceExceeded, "", fmt.Errorf("labels of %d bytes: those of a volume have at most %d together", bytes, MaxLabelBytes))
	}
	return nil
}

// ChangeLabels returns the labels after a change; nil if none is left. have is not modified.
// Errors: ResourceExceeded.
func ChangeLabels(have map[string]string, change map[string]*string) (map[string]string, error) {
	now := map[string]string{}
	maps.Copy(now, have)
	for k, v := range change { // in any order
		if v == nil {
			delete(now, k)
		} else {
			now[k] = *v
		}
	}
	if len(now) == 0 {
		return nil, nil
	}
	return now, checkLabelRoom(now)
}

// LabelSelector selects the volumes whose labels meet all its demands. The zero value selects
// all volumes.
type LabelSelector []LabelDemand

// LabelDemand is met by a volume with the key and one of the values; without values, any value
// will do. Not inverts the demand, so a volume without the key meets it.
type LabelDemand struct {
	Key    string
	Values []string
	Not    bool
}

// Matches tells whether labels meet every demand.
func (s LabelSelector) Matches(labels map[string]string) bool {
	for _, d := range s {
		v, has := labels[d.Key]
		if (has && (len(d.Values) == 0 || slices.Contains(d.Values, v))) == d.Not {
			return false
		}
	}
	return true
}

// String returns the selector in the syntax of ParseLabelSelector.
func (s LabelSelector) String() string {
	var all []string
	for _, d := range s {
		switch {
		case len(d.Values) == 0 && d.Not:
			all = append(all, "!"+d.Key)
		case len(d.Values) == 0:
			all = append(all, d.Key)
		case d.Not:
			all = append(all, d.Key+" notin ("+strings.Join(d.Values, ",")+")")
		default:
			all = append(all, d.Key+" in ("+strings.Join(d.Values, ",")+")")
		}
	}
	return strings.Join(all, ",")
}

// ParseLabelSelector parses demands separated by commas: KEY, !KEY, KEY=VALUE (also ==),
// KEY!=VALUE, KEY in (VALUE,...), KEY notin (VALUE,...). Errors: Invalid.
func ParseLabelSelector(text string) (s LabelSelector, err error) {
	for rest := strings.TrimSpace(text); ; {
		var d LabelDemand
		if d, rest, err = parseDemand(rest); err != nil {
			return nil, E("read selector", Invalid, text, err)
		}
		s = append(s, d)
		if rest == "" {
			return s, nil
		}
		rest = strings.TrimSpace(rest[1:])
	}
}

// parseDemand parses one demand. rest is empty or begins with a comma.
func parseDemand(text string) (d LabelDemand, rest string, err error) {
	if after, ok := strings.CutPrefix(text, "!"); ok {
		d.Not = true
		text = strings.TrimSpace(after)
	}
	end := strings.IndexAny(text, " \t=!,(")
	if end < 0 {
		end = len(text)
	}
	d.Key, rest = text[:end], strings.TrimSpace(text[end:])
	if err := CheckLabelKey(d.Key); err != nil {
		return d, "", err
	}
	if rest == "" || rest[0] == ',' {
		return d, rest, nil
	}
	if d.Not {
		return d, "", errors.New("behind '!' stands a key alone")
	}
	if list, ok := strings.CutPrefix(rest, "notin"); ok {
		d.Not = true
		return d.list(list)
	}
	if list, ok := strings.CutPrefix(rest, "in"); ok {
		return d.list(list)
	}
	value, ok := strings.CutPrefix(rest, "!=")
	if d.Not = ok; !ok {
		if value, ok = strings.CutPrefix(rest, "="); !ok {
			return d, "", fmt.Errorf("behind %q stands =, !=, in or notin", d.Key)
		}
		value = strings.TrimPrefix(value, "=")
	}
	value, rest = cutBefore(value, ',')
	d.Values = []string{strings.TrimSpace(value)}
	return d, rest, CheckLabelValue(d.Values[0])
}

// list reads the values in brackets.
func (d LabelDemand) list(text string) (LabelDemand, string, error) {
	text, ok := strings.CutPrefix(strings.TrimSpace(text), "(")
	values, rest, closed := strings.Cut(text, ")")
	if rest = strings.TrimSpace(rest); !ok || !closed || rest != "" && rest[0] != ',' {
		return d, "", fmt.Errorf("the values of %q stand in brackets, with commas between them", d.Key)
	}
	for v := range strings.SplitSeq(values, ",") {
		v = strings.TrimSpace(v)
		if err := CheckLabelValue(v); err != nil {
			return d, "", err
		}
		d.Values = append(d.Values, v)
	}
	return d, rest, nil
}

// cutBefore cuts in front of c.
func cutBefore(s string, c byte) (before, from string) {
	if i := strings.IndexByte(s, c); i >= 0 {
		return s[:i], s[i:]
	}
	return s, ""
}
