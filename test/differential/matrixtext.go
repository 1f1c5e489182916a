package differential

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// splitCell splits "DIRECTORY VERB OBJECT... USER[ warm]" before the user and after it.
func splitCell(cell string) (attempt, user, warm string) {
	cell, isWarm := strings.CutSuffix(cell, warmSuffix)
	if isWarm {
		warm = warmSuffix
	}
	at := strings.LastIndexByte(cell, ' ')
	return cell[:at], cell[at+1:], warm
}

const warmSuffix = " warm"

// FormatMatrix returns the text of a matrix's lines. Users with the same result share a line. The
// text of several matrices can be concatenated: name is the first word of each line.
func FormatMatrix(name string, lines []string) string {
	var order []string
	names := make(map[string]string) // users by everything else
	for _, line := range lines {
		cell, result, _ := strings.Cut(line, " => ")
		attempt, user, warm := splitCell(cell)
		key := attempt + " %s" + warm + " => " + result
		if names[key] == "" {
			order = append(order, key)
			names[key] = user
		} else {
			names[key] += "," + user
		}
	}
	var b strings.Builder
	for _, key := range order {
		fmt.Fprintf(&b, name+" "+key+"\n", names[key])
	}
	return b.String()
}

// ParseMatrix returns the results in a text of FormatMatrix: the name of the matrix to the cell to
// the result. Lines that begin with # are comments.
func ParseMatrix(text string) map[string]map[string]string {
	out := make(map[string]map[string]string)
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		name, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		cell, result, _ := strings.Cut(rest, " => ")
		if out[name] == nil {
			out[name] = make(map[string]string)
		}
		attempt, names, warm := splitCell(cell)
		for user := range strings.SplitSeq(names, ",") {
			out[name][attempt+" "+user+warm] = result
		}
	}
	return out
}

// MatrixDifference is a cell with two results.
type MatrixDifference struct{ Cell, Reference, Ours string }

// CompareMatrix returns the cells whose results differ. A warm cell without a line has the result
// of the cold cell.
func CompareMatrix(reference, ours map[string]string) (list []MatrixDifference) {
	result := func(from map[string]string, cell string) string {
		if r, ok := from[cell]; ok {
			return r
		}
		return from[strings.TrimSuffix(cell, warmSuffix)]
	}
	cells := make(map[string]bool)
	for _, m := range []map[string]string{reference, ours} {
		for cell := range m {
			cells[cell] = true
		}
	}
	for _, cell := range slices.Sorted(maps.Keys(cells)) {
		if r, o := result(reference, cell), result(ours, cell); r != o {
			list = append(list, MatrixDifference{cell, r, o})
		}
	}
	return list
}
