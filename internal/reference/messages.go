package reference

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/token"
	"slices"
	"strings"
)

// A Message is a message of the log.
type Message struct {
	Level   string // trace, debug, info, warn or error
	Package string // that logs it, such as "pkg/mount"
	Text    string
	Keys    []string // of the values beside the text
}

// levels are the methods of hclog.Logger, and the method of log.Logger, whose output has level
// debug in the log of the daemon.
var levels = map[string]string{"Trace": "trace", "Debug": "debug", "Info": "info", "Warn": "warn", "Error": "error",
	"Printf": "debug"}

// loggers are the names of fields and variables that are loggers. "fs" has the method Warn in
// pkg/fusefs and pkg/front.
var loggers = []string{"log", "logger", "Log", "Logger", "fs"}

// Messages returns the messages of the log, by level from error to trace and then by package. It is
// an error if the source hides a text.
func (s *Source) Messages() ([]Message, error) {
	all := make(map[string]*Message)
	for _, p := range s.packages {
		for _, f := range p.files {
			for _, d := range f.Decls {
				fn, ok := d.(*ast.FuncDecl)
				if !ok {
					continue
				}
				for _, c := range logCalls(fn) {
					texts, err := s.messageTexts(p, f, fn, c)
					if err != nil {
						return nil, err
					}
					for _, text := range texts {
						level := levels[c.Fun.(*ast.SelectorExpr).Sel.Name]
						m := all[level+p.dir+text]
						if m == nil {
							m = &Message{Level: level, Package: p.dir, Text: text}
							all[level+p.dir+text] = m
						}
						m.Keys = append(m.Keys, s.keys(f, fn, c)...)
					}
				}
			}
		}
	}
	var list []Message
	for _, m := range all {
		m.Keys = unique(m.Keys)
		list = append(list, *m)
	}
	order := []string{"error", "warn", "info", "debug", "trace"}
	slices.SortFunc(list, func(a, b Message) int {
		return cmp.Or(slices.Index(order, a.Level)-slices.Index(order, b.Level), cmp.Compare(a.Package, b.Package),
			cmp.Compare(a.Text, b.Text))
	})
	return list, nil
}

// logCalls returns the calls of loggers in fn.
func logCalls(fn *ast.FuncDecl) []*ast.CallExpr {
	var calls []*ast.CallExpr
	ast.Inspect(fn, func(n ast.Node) bool {
		c, ok := n.(*ast.CallExpr)
		if !ok || len(c.Args) == 0 {
			return true
		}
		if sel, ok := c.Fun.(*ast.SelectorExpr); ok && levels[sel.Sel.Name] != "" &&
			slices.Contains(loggers, lastName(sel.X)) {
			calls = append(calls, c)
		}
		return true
	})
	return calls
}

// messageTexts returns the texts of a call: one, or those that the callers of fn pass for a
// parameter.
func (s *Source) messageTexts(p *sourcePackage, f *ast.File, fn *ast.FuncDecl, c *ast.CallExpr) ([]string, error) {
	text := s.text(f, c.Args[0])
	if strings.Trim(text, Unknown) != "" {
		return []string{withoutVerbs(text)}, nil
	}
	var texts []string
	if i := parameter(fn, lastName(c.Args[0])); i >= 0 {
		for _, f := range p.files {
			ast.Inspect(f, func(n ast.Node) bool {
				if c, ok := n.(*ast.CallExpr); ok && i < len(c.Args) && lastName(c.Fun) == fn.Name.Name {
					texts = append(texts, strings.Trim(s.text(f, c.Args[i]), Unknown))
				}
				return true
			})
		}
	}
	texts = slices.DeleteFunc(texts, func(text string) bool { return text == "" })
	if len(texts) == 0 {
		return nil, fmt.Errorf("%s: the message has no constant text", s.position(c))
	}
	return texts, nil
}

// parameter returns the index of the parameter of fn with a name, or -1.
func parameter(fn *ast.FuncDecl, name string) int {
	i := 0
	for _, field := range fn.Type.Params.List {
		for _, n := range field.Names {
			if n.Name == name {
				return i
			}
			i++
		}
	}
	return -1
}

// keys returns the keys of a call, also those that append adds to a list, and those of the list if
// fn makes it before the call.
func (s *Source) keys(f *ast.File, fn *ast.FuncDecl, c *ast.CallExpr) []string {
	if c.Fun.(*ast.SelectorExpr).Sel.Name == "Printf" {
		return nil
	}
	if c.Ellipsis == token.NoPos {
		return s.everySecond(f, c.Args[1:])
	}
	var keys []string
	list := c.Args[len(c.Args)-1]
	if more, ok := list.(*ast.CallExpr); ok && lastName(more.Fun) == "append" {
		list = more.Args[0]
		keys = s.everySecond(f, more.Args[1:])
	}
	ast.Inspect(fn, func(n ast.Node) bool {
		a, ok := n.(*ast.AssignStmt)
		if !ok || a.Pos() > c.Pos() || len(a.Lhs) != 1 || lastName(a.Lhs[0]) != lastName(list) {
			return true
		}
		switch v := a.Rhs[0].(type) {
		case *ast.CompositeLit:
			keys = append(keys, s.everySecond(f, v.Elts)...)
		case *ast.CallExpr:
			if lastName(v.Fun) == "append" {
				keys = append(keys, s.everySecond(f, v.Args[1:])...)
			}
		}
		return true
	})
	return keys
}

// everySecond returns the texts of the first, the third and so on of list.
func (s *Source) everySecond(f *ast.File, list []ast.Expr) []string {
	var keys []string
	for i := 0; i < len(list); i += 2 {
		keys = append(keys, s.text(f, list[i]))
	}
	return keys
}

// An Error is an error of a command, with its class.
type Error struct {
	Class   string // value of a control.Code
	Package string
	Text    string
}

// Errors returns the errors that have a class, by class and text. Other errors are the causes that
// follow these texts.
func (s *Source) Errors() []Error {
	var all []Error
	for _, p := range s.packages {
		for _, f := range p.files {
			ast.Inspect(f, func(n ast.Node) bool {
				class, text := s.classified(f, n)
				if text = withoutVerbs(text); strings.Trim(text, Unknown+" :;") != "" {
					all = append(all, Error{class, p.dir, text})
				}
				return true
			})
		}
	}
	slices.SortFunc(all, func(a, b Error) int {
		return cmp.Or(cmp.Compare(a.Class, b.Class), cmp.Compare(a.Text, b.Text), cmp.Compare(a.Package, b.Package))
	})
	return slices.Compact(all)
}

// classified returns the class and the text of an error that n makes: a call with a class and a
// text, or a literal with the fields Code and Text.
func (s *Source) classified(f *ast.File, n ast.Node) (class, text string) {
	switch n := n.(type) {
	case *ast.CallExpr:
		for i := range len(n.Args) - 1 {
			if class := s.class(f, n.Args[i]); class != "" {
				return class, s.text(f, n.Args[i+1])
			}
		}
	case *ast.CompositeLit:
		for _, e := range n.Elts {
			kv, ok := e.(*ast.KeyValueExpr)
			if !ok {
				continue
			}
			switch lastName(kv.Key) {
			case "Code":
				class = s.class(f, kv.Value)
			case "Text":
				text = s.text(f, kv.Value)
			}
		}
		if class != "" {
			return class, text
		}
	}
	return "", ""
}

// class returns the value of a constant control.CodeX, or "".
func (s *Source) class(f *ast.File, e ast.Expr) string {
	name := lastName(e)
	if !strings.HasPrefix(name, "Code") {
		return ""
	}
	if sel, ok := e.(*ast.SelectorExpr); f.Name.Name != "control" && (!ok || lastName(sel.X) != "control") {
		return ""
	}
	return s.constants["control."+name]
}

// withoutVerbs replaces the verbs of package fmt in text by [Unknown].
func withoutVerbs(text string) string {
	var b strings.Builder
	for i := 0; i < len(text); i++ {
		if text[i] != '%' || i+1 == len(text) {
			b.WriteByte(text[i])
			continue
		}
		end := i + 1
		for end < len(text)-1 && strings.ContainsRune("+-# 0123456789.[]*", rune(text[end])) {
			end++
		}
		if text[end] == '%' {
			b.WriteByte('%')
		} else {
			b.WriteString(Unknown)
		}
		i = end
	}
	return strings.ReplaceAll(b.String(), Unknown+Unknown, Unknown)
}

// unique returns list without repetitions.
func unique(list []string) []string {
	var kept []string
	for _, v := range list {
		if !slices.Contains(kept, v) {
			kept = append(kept, v)
		}
	}
	return kept
}

// Quote returns text as inline code for a cell of a Markdown table.
func Quote(text string) string {
	return "`" + strings.NewReplacer("|", `\|`, "`", "'", "\n", " ", "\t", " ").Replace(text) + "`"
}
