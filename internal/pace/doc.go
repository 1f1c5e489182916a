// Package pace bounds how often this process does something that others cause: attempts that fail
// ([Backoff]), and messages in the log ([Limiter]).
package pace
