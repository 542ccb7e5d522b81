package server

import "encoding/json"

// pageBytes bounds a page of a longer answer, in bytes of JSON: far below wire.MaxFrame.
const pageBytes = 4 << 20

// pageOf returns the first items of a list that fit into pageBytes, at least the first.
func pageOf[T any](all []T, size func(*T) int) []T {
	n := 0
	for i := range all {
		if n += size(&all[i]); n > pageBytes && i > 0 {
			return all[:i]
		}
	}
	return all
}

// jsonSize returns the bytes that an item takes in an answer, at most.
func jsonSize[T any](item *T) int {
	b, err := json.Marshal(item)
	if err != nil {
		panic("server: a report is plain data: " + err.Error())
	}
	return len(b) + 1
}
